package debughttp_test

import (
	"context"
	"errors"
	"net/http"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/node/debughttp"
)

// rulesSource is a Source whose engine programs one Service.
type rulesSource struct{ fakeSource }

func (*rulesSource) Rules(_ context.Context, name types.NamespacedName) (map[v1.IPFamily]string, error) {
	switch name.String() {
	case "shop/web":
		return map[v1.IPFamily]string{v1.IPv6Protocol: "six\n", v1.IPv4Protocol: "four\n"}, nil
	case "shop/userspace":
		return nil, errors.ErrUnsupported
	default:
		return nil, nil
	}
}

func TestRulesOfOneServiceAreAnswered(t *testing.T) {
	h := debughttp.Handler(&rulesSource{})
	wantAt(t, get(t, h, "/rules?namespace=shop&name=web", http.StatusOK),
		`{"families":[{"family":"IPv4","text":"four\n"},{"family":"IPv6","text":"six\n"}],"name":"web","namespace":"shop"}`)
	get(t, h, "/rules?namespace=shop&name=nobody", http.StatusNotFound)
	get(t, h, "/rules?namespace=shop&name=userspace", http.StatusNotImplemented)
}
