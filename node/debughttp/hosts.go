package debughttp

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Hosts adds host names that the Handler accepts besides IP addresses and localhost: see
// KnownHosts.
func Hosts(names ...string) Option {
	return func(h *handler) { h.hosts = append(h.hosts, names...) }
}

// AnyHost makes KnownHosts accept every name: use it only if the server authenticates
// its clients.
const AnyHost = "*"

// KnownHosts passes requests to next whose Host is an IP address, localhost or one of the
// names, with any port. It answers others with 421 (RFC 9110, section 15.5.20). This
// prevents DNS rebinding: another site can resolve its own name to the server's address
// and read responses through an operator's browser, but the browser sends that name.
// Requests without a Host do not come from browsers, and pass. Handler does this already.
func KnownHosts(next http.Handler, names ...string) http.Handler {
	names = known(names)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isKnown(r.Host, names) {
			w.Header().Set("X-Content-Type-Options", "nosniff")
			refuseHost(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func refuseHost(w http.ResponseWriter, r *http.Request) {
	writeError(w, http.StatusMisdirectedRequest,
		fmt.Sprintf("host %q: want an IP address, localhost or a configured name of this server", r.Host))
}

// known normalizes the names for isKnown.
func known(names []string) []string {
	all := []string{"localhost"}
	for _, name := range names {
		all = append(all, plain(name))
	}
	return all
}

func isKnown(host string, known []string) bool {
	if host == "" || slices.Contains(known, AnyHost) {
		return true
	}
	name := plain(host)
	_, err := netip.ParseAddr(name)
	return err == nil || slices.Contains(known, name)
}

// plain removes port, brackets and final dot, and converts to lower case.
func plain(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else if inner, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(inner, "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
