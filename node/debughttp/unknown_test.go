package debughttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// unknownValues is a Source that explains packets with one number in all enumerations.
type unknownValues uint8

func (unknownValues) Status() proxier.Status                      { return proxier.Status{} }
func (unknownValues) History() []proxier.SyncReport               { return nil }
func (unknownValues) Programmed(v1.IPFamily) *changetracker.State { return nil }
func (unknownValues) Verify(context.Context) (map[v1.IPFamily]proxier.Verification, error) {
	return nil, nil
}

func (unknownValues) Rules(context.Context, types.NamespacedName) (map[v1.IPFamily]string, error) {
	return nil, nil
}

func (unknownValues) Sends(...netip.AddrPort) []proxier.Sending { return nil }

func (u unknownValues) frontend() desired.Frontend {
	return desired.Frontend{
		Kind: desired.Kind(u), Scope: desired.Scope(u), Action: desired.Action(u), Masquerade: desired.Masquerading(u),
		VIP: netip.MustParseAddr("10.96.0.1"), Port: 80,
	}
}

func (unknownValues) Resolved(v1.IPFamily) *desired.Resolved { return nil }

func (unknownValues) Counts(context.Context, v1.IPFamily) (connection.Counts, error) {
	return connection.Counts{}, nil
}

func (u unknownValues) Explain(_ context.Context, p desired.Packet) (desired.Explanation, error) {
	f := u.frontend()
	return desired.Explanation{
		Packet: p, Verdict: desired.Verdict(u), Scope: desired.Scope(u), Service: &changetracker.ServicePortName{}, Frontend: &f,
	}, nil
}

func TestUnknownValuesOfEnumerationsAreShown(t *testing.T) {
	t.Parallel()
	for _, n := range []uint8{0, 1, 9, 255} {
		handler := debughttp.Handler(unknownValues(n))
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET",
			"http://localhost/explain?protocol=TCP&origin=outside&source=192.0.2.1&destination=10.96.0.1:80", nil))
		if !json.Valid(w.Body.Bytes()) || w.Code != 200 || n > 4 && !bytes.Contains(w.Body.Bytes(), fmt.Appendf(nil, "unknown_%d", n)) {
			t.Errorf("%d: status %d, %s", n, w.Code, w.Body)
		}
	}
}
