package programmed

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"
)

// MaxAsked is how many endpoints Handler answers about, and how many a ServiceChange may have.
const MaxAsked = 32

// Bounds of an answer, for callers that nobody knows.
const (
	mostListed   = 100
	longestText  = 256
	lookShare    = 10 // answers take a tenth of the time at most
	shortestLook = time.Millisecond
)

// Handler answers with the NodeReport of a node: about the Service of the query "service=NAMESPACE/NAME",
// and the endpoints of "endpoint=ADDRESS" or "endpoint=ADDRESS:PORT", of which there may be MaxAsked. It
// tells nothing of others: they are only counted. Answers that take long have pauses after them, so that
// callers take at most a tenth of the time of a processor.
func Handler(node string, from Proxy) http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		asked, err := parseEndpoints(query["endpoint"])
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		report, ok := answer(r.Context(), turn, func() NodeReport { return NewReport(node, from, time.Now(), asked...) })
		if !ok {
			return // the client has gone
		}
		report.keep(query.Get("service"))
		report.Limit(mostListed, longestText)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_ = json.NewEncoder(w).Encode(report) // the client may have disconnected
	})
}

// answer calls do, one after the other, with a pause after what took long. ok is false if ctx ends before.
func answer(ctx context.Context, turn chan struct{}, do func() NodeReport) (r NodeReport, ok bool) {
	select {
	case turn <- struct{}{}:
	case <-ctx.Done():
		return r, false
	}
	began := time.Now()
	defer func() {
		if took := time.Since(began); took > shortestLook {
			time.AfterFunc((lookShare-1)*took, func() { <-turn })
		} else {
			<-turn
		}
	}()
	return do(), true
}

// parseEndpoints parses addresses with or without ports.
func parseEndpoints(texts []string) (all []netip.AddrPort, err error) {
	if len(texts) > MaxAsked {
		return nil, fmt.Errorf("%d endpoints, want at most %d", len(texts), MaxAsked)
	}
	for _, text := range texts {
		endpoint, err := ParseEndpoint(text)
		if err != nil {
			return nil, err
		}
		all = append(all, endpoint)
	}
	return all, nil
}

// ParseEndpoint parses an address, or an address and a port. Without a port, it is 0, which stands for all.
func ParseEndpoint(text string) (netip.AddrPort, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return netip.AddrPortFrom(addr.Unmap(), 0), nil
	}
	endpoint, err := netip.ParseAddrPort(text)
	if err != nil {
		return endpoint, fmt.Errorf("endpoint %q: want ADDRESS or ADDRESS:PORT", text)
	}
	return unmapped(endpoint), nil
}

// formatEndpoint is the inverse of ParseEndpoint.
func formatEndpoint(e netip.AddrPort) string {
	e = unmapped(e)
	if e.Port() == 0 {
		return e.Addr().String()
	}
	return e.String()
}

// keep drops the failures of all other Services, and what sends to endpoints that were not asked for.
func (r *NodeReport) keep(service string) {
	for name, f := range r.Families {
		if all := len(f.Failed); service == "" {
			f.Failed, f.Unlisted = nil, all
		}
		f.Failed = slices.DeleteFunc(f.Failed, func(e Failure) bool { return e.Namespace+"/"+e.Service != service })
		all := len(f.Sends)
		f.Sends = slices.DeleteFunc(f.Sends, func(s Send) bool {
			return !slices.ContainsFunc(r.Asked, func(asked netip.AddrPort) bool { return covers(asked, s.Endpoint) })
		})
		f.UnlistedSends = all - len(f.Sends)
		r.Families[name] = f
	}
}
