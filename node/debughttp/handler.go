package debughttp

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Proxy is what a Handler shows; *[proxier.Proxier] implements it. Several goroutines
// call its methods at once.
type Proxy interface {
	Status() proxier.Status
	History() []proxier.SyncReport
	Programmed(family v1.IPFamily) *changetracker.State
	Resolved(family v1.IPFamily) *desired.Resolved
	Explain(ctx context.Context, packet desired.Packet) (desired.Explanation, error)
	Verify(ctx context.Context) (map[v1.IPFamily]proxier.Verification, error)
	Counts(ctx context.Context, family v1.IPFamily) (connection.Counts, error)
	Rules(ctx context.Context, name types.NamespacedName) (map[v1.IPFamily]string, error)
	Sends(endpoints ...netip.AddrPort) []proxier.Sending
}

var _ Proxy = (*proxier.Proxier)(nil)

// Option is an option of Handler.
type Option func(*handler)

// Title sets the heading of the page, to distinguish proxies. The default is
// "serviceplane".
func Title(text string) Option { return func(h *handler) { h.title = text } }

// Version sets the version of the program, for status.
func Version(text string) Option { return func(h *handler) { h.version = text } }

// Handler returns a handler that shows the source to every client: see "Keep it inside".
// It may be mounted anywhere, with [http.StripPrefix]. It accepts only GET and HEAD,
// and POST for the Tracer's path, and only requests whose Host is an IP address, localhost or one of Hosts.
func Handler(source Proxy, options ...Option) http.Handler {
	h := &handler{source: source, title: "serviceplane", pages: pages()}
	for _, option := range options {
		option(h)
	}
	h.answers = map[string]answer{
		"status":     h.status,
		"services":   h.services,
		"service":    h.service,
		"namespaces": h.namespaces,
		"syncs":      h.syncs,
		"explain":    h.explain,
		"state":      h.state,
		"verify":     h.verify,
		"counts":     h.counts,
		"rules":      h.rules,
		"programmed": h.programmedUpTo,
	}
	h.hosts = known(h.hosts)
	return h
}

type handler struct {
	hosts   []string
	source  Proxy
	title   string
	version string
	pages   map[string]page
	answers map[string]answer
	index   index

	verifying sync.Mutex // held by a request for verify

	tracer func(context.Context, TraceRequest) (TraceAnswer, error) // nil without one
	traces chan struct{}                                            // has an element for each that runs
}

// securityPolicy allows only the page's own files, and forbids frames.
const securityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// ServeHTTP routes by itself: an http.ServeMux would redirect to paths without the prefix
// that http.StripPrefix removed.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Security-Policy", securityPolicy)
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Referrer-Policy", "no-referrer")
	if !isKnown(r.Host, h.hosts) {
		refuseHost(w, r)
		return
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	if name == "trace" {
		if h.tracer == nil {
			writeError(w, http.StatusNotFound, "no such page")
			return
		}
		h.trace(w, r)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		writeError(w, http.StatusMethodNotAllowed, "want method GET")
		return
	}
	switch name {
	case "watch":
		h.watch(w, r)
		return
	case "report":
		h.report(w, r)
		return
	}
	if answer, ok := h.answers[name]; ok {
		answer.serve(w, r)
		return
	}
	if name == "" && redirectToFolder(w, r) {
		return
	}
	if page, ok := h.pages[name]; ok {
		page.serve(w)
		return
	}
	writeError(w, http.StatusNotFound, "no such page")
}

// redirectToFolder adds the missing slash to the mount point's path, so that the page's
// relative URLs work. The redirect is relative too, since only the client knows the
// whole path.
func redirectToFolder(w http.ResponseWriter, r *http.Request) bool {
	requested, err := url.ParseRequestURI(r.RequestURI)
	if err != nil || requested.Path == "" || strings.HasSuffix(requested.Path, "/") {
		return false
	}
	w.Header().Set("Location", "./"+url.PathEscape(path.Base(requested.Path))+"/")
	w.WriteHeader(http.StatusTemporaryRedirect)
	return true
}
