package debughttp

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Hosts are names that clients may use for the Handler's server, beside addresses and
// localhost: see KnownHosts.
func Hosts(names ...string) Option {
	return func(h *handler) { h.hosts = append(h.hosts, names...) }
}

// AnyHost among the names of KnownHosts allows every name: for a server that
// authenticates its clients.
const AnyHost = "*"

// KnownHosts answers requests for an IP address, for localhost and for the given
// names, of any port, and others with 421 (RFC 9110, section 15.5.20). It keeps pages
// of other sites from reading the answers through the browser of somebody who can
// reach the server: a site can point its own DNS name at any address, but the
// browser still sends that name. Clients without a Host header are no browsers, and
// pass. Handler does this already.
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
		fmt.Sprintf("host %q: want an IP address, localhost or a name that this server is configured to have", r.Host))
}

// known returns the names in the form that isKnown compares.
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

// plain is a host without port, brackets and final dot, in lower case.
func plain(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else if inner, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(inner, "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
