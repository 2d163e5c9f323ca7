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

// judgementLasts is how old a judgement may be: thousands of probes must not build
// thousands of Statuses.
const judgementLasts = 200 * time.Millisecond

// judgement is whether the proxy is healthy.
type judgement struct {
	status    func() proxier.Status // nil counts as healthy
	threshold time.Duration

	mu      sync.Mutex // guards all below, and is held while status is made
	made    time.Time
	healthy bool
}

func (j *judgement) isHealthy() bool {
	if j.status == nil {
		return true
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.made.IsZero() || time.Since(j.made) >= judgementLasts {
		status := j.status()
		j.made = time.Now()
		j.healthy = Judge(status, j.threshold, j.made).Healthy
	}
	return j.healthy
}

// answerer answers for all Services.
type answerer struct {
	ports     *NodePorts
	judgement judgement
}

// portAnswer is the body of an answer, as kube-proxy's.
type portAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// handler answers about one Service, whatever the path and the method. For one that
// is gone, as connections may outlive it, there are no endpoints.
func (a *answerer) handler(name types.NamespacedName) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var answer portAnswer
		answer.Service.Namespace, answer.Service.Name = name.Namespace, name.Name
		answer.LocalEndpoints = a.ports.local(name, familyOf(r))
		answer.ServiceProxyHealthy = a.judgement.isHealthy()
		code := http.StatusServiceUnavailable
		if answer.LocalEndpoints != 0 && answer.ServiceProxyHealthy {
			code = http.StatusOK
		}
		body, _ := json.MarshalIndent(answer, "", "\t") // texts and numbers always can
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(answer.LocalEndpoints))
		writeHeader(w, code)
		_, _ = w.Write(body) // the client may have gone
	}
}

func (n *NodePorts) local(name types.NamespacedName, family v1.IPFamily) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.book.local(name, family)
}

// familyOf is the family that a client uses: that of the address it dialled.
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
