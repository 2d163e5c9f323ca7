package debughttp_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// verifySource is a Source whose kernel has differences.
type verifySource struct {
	fakeSource

	begun   chan struct{} // gets a value for each call, if not nil
	results map[v1.IPFamily]proxier.Verification
	err     error
}

func (s *verifySource) Verify(ctx context.Context) (map[v1.IPFamily]proxier.Verification, error) {
	if s.begun != nil {
		s.begun <- struct{}{}
		<-ctx.Done()
	}
	return s.results, s.err
}

func TestVerifyListsTheDifferences(t *testing.T) {
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP}
	s := &verifySource{results: map[v1.IPFamily]proxier.Verification{
		v1.IPv6Protocol: {Err: errors.New("no access")},
		v1.IPv4Protocol: {Total: 1200, Checked: 9, Differences: []proxier.Difference{
			{Object: "chain a", Problem: proxier.DifferenceUnexpected},
			{Object: "element b", Problem: proxier.DifferenceChanged, Want: "1", Have: "2", Service: name},
		}},
	}}
	a := get(t, debughttp.Handler(s), "/verify", http.StatusOK)
	wantAt(t, a, `false`, "agrees")
	wantAt(t, a, `{"checked":9,"differences":[{"object":"chain a","problem":"unexpected"},`+
		`{"have":"2","object":"element b","problem":"different","service":"shop/web:http/TCP","want":"1"}],"family":"IPv4","total":1200}`, "families", 0)
	wantAt(t, a, `{"checked":0,"differences":[],"error":"no access","family":"IPv6","total":0}`, "families", 1)
	s.results = map[v1.IPFamily]proxier.Verification{v1.IPv4Protocol: {Checked: 9}}
	wantAt(t, get(t, debughttp.Handler(s), "/verify", http.StatusOK), `true`, "agrees")
	s.err = runner.ErrEnded
	get(t, debughttp.Handler(s), "/verify", http.StatusServiceUnavailable)
}

// The answer of a Proxier says that its engine cannot verify.
func TestVerifyOfAnEngineThatCannot(t *testing.T) {
	_, h := webProxy(t)
	a := get(t, h, "/verify", http.StatusOK)
	wantAt(t, a, `false`, "agrees")
	wantAt(t, a, `"verify: unsupported operation by the engine of IPv4"`, "families", 0, "error")
}

// TestVerifyAnswersOneRequestAtATime: a second one would make syncs wait longer.
func TestVerifyAnswersOneRequestAtATime(t *testing.T) {
	s := &verifySource{begun: make(chan struct{})}
	h := debughttp.Handler(s)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.ServeHTTP(httptest.NewRecorder(), request(http.MethodGet, "/verify").WithContext(ctx))
	}()
	<-s.begun
	w := httptest.NewRecorder()
	h.ServeHTTP(w, request(http.MethodGet, "/verify"))
	if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
		t.Errorf("a second request = %d, Retry-After %q, want 503", w.Code, w.Header().Get("Retry-After"))
	}
	cancel()
	<-ended
	s.begun = nil
	get(t, h, "/verify", http.StatusOK)
}
