package healthcheck

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/proxier"
)

// healthTTL is how long the proxy's health is cached, so that thousands of probes do not
// compute thousands of Statuses.
const healthTTL = 200 * time.Millisecond

// answerer answers for all Services.
type answerer struct {
	localEndpoints func(service types.NamespacedName, family v1.IPFamily) int
	status         func() proxier.Status // nil means healthy
	threshold      time.Duration

	mu      sync.Mutex // guards all below, and is held while status runs
	checked time.Time
	healthy bool
}

func (a *answerer) isHealthy() bool {
	if a.status == nil {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checked.IsZero() || time.Since(a.checked) >= healthTTL {
		status := a.status()
		a.checked = time.Now()
		a.healthy = Evaluate(status, a.threshold, a.checked).Healthy
	}
	return a.healthy
}

// portAnswer is the body of an answer. It is the same as kube-proxy's.
type portAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// handler answers for one Service, whatever the path and the method. A Service that was
// deleted while a connection stayed open has no endpoints.
func (a *answerer) handler(name types.NamespacedName) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var answer portAnswer
		answer.Service.Namespace, answer.Service.Name = name.Namespace, name.Name
		answer.LocalEndpoints = a.localEndpoints(name, familyOf(r))
		answer.ServiceProxyHealthy = a.isHealthy()
		code := http.StatusServiceUnavailable
		if answer.LocalEndpoints != 0 && answer.ServiceProxyHealthy {
			code = http.StatusOK
		}
		body, _ := json.MarshalIndent(answer, "", "\t") // cannot fail for strings and numbers
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(answer.LocalEndpoints))
		writeHeader(w, code)
		_, _ = w.Write(body) // the client may have gone
	}
}

// familyOf returns the family of the address that the client dialled.
func familyOf(r *http.Request) v1.IPFamily {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return v1.IPv4Protocol
	}
	address, err := netip.ParseAddrPort(local.String())
	if err != nil || address.Addr().Unmap().Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}
