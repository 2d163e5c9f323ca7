package debughttp

import (
	"context"
	"net/http"
	"net/url"
	"path"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Source is what a Handler looks into; *[proxier.Proxier] is one. Its methods are
// called by several goroutines at once.
type Source interface {
	Status() proxier.Status
	History() []proxier.SyncReport
	Programmed(family v1.IPFamily) *changetracker.State
	Resolved(family v1.IPFamily, name changetracker.ServicePortName) (*desired.Service, bool)
	Explain(ctx context.Context, packet desired.Packet) (desired.Explanation, error)
}

var _ Source = (*proxier.Proxier)(nil)

// Option changes a Handler under construction.
type Option func(*handler)

// Title is what the page is headed with, to tell proxies apart. Without it, that is
// "serviceplane".
func Title(text string) Option { return func(h *handler) { h.title = text } }

// Handler shows the source, to everybody who asks: see "Keep it inside". It may be
// mounted anywhere, with [http.StripPrefix]. It answers GET and HEAD only, and only
// requests whose Host is an address, localhost or one of Hosts.
func Handler(source Source, options ...Option) http.Handler {
	h := &handler{source: source, title: "serviceplane", pages: pages()}
	for _, option := range options {
		option(h)
	}
	h.answers = map[string]answer{
		"status":   h.status,
		"services": h.services,
		"service":  h.service,
		"syncs":    h.syncs,
		"explain":  h.explain,
	}
	h.hosts = known(h.hosts)
	return h
}

type handler struct {
	hosts   []string
	source  Source
	title   string
	pages   map[string]page
	answers map[string]answer
}

// securityPolicy lets the page use its own files, and nobody show it in a frame.
const securityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// ServeHTTP has its own routes, because an http.ServeMux redirects to paths that it
// knows without the prefix that was stripped.
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
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		writeError(w, http.StatusMethodNotAllowed, "want GET")
		return
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
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

// redirectToFolder sends a browser that asked for the mounting point without its
// slash to where the page's relative URLs are right. The target is relative too, as
// only the client knows the whole path.
func redirectToFolder(w http.ResponseWriter, r *http.Request) bool {
	asked, err := url.ParseRequestURI(r.RequestURI)
	if err != nil || asked.Path == "" || strings.HasSuffix(asked.Path, "/") {
		return false
	}
	w.Header().Set("Location", "./"+url.PathEscape(path.Base(asked.Path))+"/")
	w.WriteHeader(http.StatusTemporaryRedirect)
	return true
}
