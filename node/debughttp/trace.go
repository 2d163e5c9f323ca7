package debughttp

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/answers"
)

// TraceRequest asks a function to follow a packet through the rules of the node.
type TraceRequest struct {
	Packet desired.Packet
	// Packets is after how many packets the trace ends; at least 1.
	Packets int
	// Timeout is when it ends at the latest; positive.
	Timeout time.Duration
	// Send means that the function sends the packet itself, from the network namespace NetNS:
	// a name or a path, or empty for the node's.
	Send  bool
	NetNS string
}

// TraceAnswer is what happened to the packet.
type TraceAnswer struct {
	// Steps are the rules and policies that the packet met, in order.
	Steps []TraceStep
	// Verdict is what happened, in one word; By says who decided.
	Verdict, By string
	// Reasons are why it is not what the explanation says, and hints.
	Reasons []string
	// Sent is how it went to send the packet; empty without TraceRequest.Send.
	Sent string
	// Explanation is what should happen. Agrees reports whether it did.
	Explanation desired.Explanation
	Agrees      bool
}

// TraceStep is a rule that a packet matched, or the policy of a base chain.
type TraceStep struct {
	Family, Table, Chain string
	// Hook is where the chain is.
	Hook string
	// Rule and Comment are empty, and Handle is 0, for a policy.
	Rule, Comment string
	Handle        uint64
	// Command prints the rule by its handle, if Rule is not complete.
	Command string
	Verdict string
	// Ours reports whether the rule is this proxy's.
	Ours bool
}

// WithTracer lets clients POST to the path trace, which calls f: it changes the node while it runs,
// and may send a packet. Give it only to a Handler that none but administrators reach, such as
// one at a unix socket of root. At most four traces run at once. f must end with its context.
func WithTracer(f func(context.Context, TraceRequest) (TraceAnswer, error)) Option {
	return func(h *handler) { h.tracer, h.traces = f, make(chan struct{}, tracesAtOnce) }
}

// The bounds of traces.
const (
	tracesAtOnce    = 4
	defaultTraceFor = 5 * time.Second
	maxTraceFor     = 5 * time.Minute
	maxTracePackets = 100
)

// trace answers a POST. Browsers send one for any site, so it refuses those of other origins.
func (h *handler) trace(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		writeError(w, http.StatusMethodNotAllowed, "want method POST")
		return
	}
	if err := new(http.CrossOriginProtection).Check(r); err != nil {
		writeError(w, http.StatusForbidden, "the request is from a page of another origin")
		return
	}
	select {
	case h.traces <- struct{}{}:
		defer func() { <-h.traces }()
	default:
		w.Header().Set("Retry-After", strconv.Itoa(int(defaultTraceFor.Seconds())))
		writeError(w, http.StatusServiceUnavailable, "too many traces run: wait for one to end")
		return
	}
	// The server's deadlines are shorter than a trace; recorders have none.
	control := http.NewResponseController(w)
	_, _ = control.SetReadDeadline(time.Time{}), control.SetWriteDeadline(time.Time{})
	answer(h.traced).serve(w, r)
}

func (h *handler) traced(r *http.Request, q query) (any, error) {
	request, err := q.trace()
	if err != nil {
		return nil, err
	}
	t, err := h.tracer(r.Context(), request)
	if err != nil {
		return nil, err
	}
	e := explanationOf(&t.Explanation)
	return answers.Trace{
		Packet: e.Packet, Steps: converted(t.Steps, func(s TraceStep) answers.TraceStep { return answers.TraceStep(s) }), Verdict: t.Verdict, By: t.By,
		Reasons: listed(t.Reasons), Sent: t.Sent, Explain: e, Agrees: t.Agrees,
	}, nil
}

// trace parses the parameters of trace.
func (q query) trace() (t TraceRequest, err error) {
	if t.Packet, err = q.packet(); err != nil {
		return t, err
	}
	if t.Packets, err = q.number("packets", 1, 1, maxTracePackets); err != nil {
		return t, err
	}
	t.Timeout = defaultTraceFor
	if text := q.values.Get("timeout"); text != "" {
		if t.Timeout, err = time.ParseDuration(text); err != nil || t.Timeout <= 0 || t.Timeout > maxTraceFor {
			return t, &parameterError{"timeout", "want a duration such as 5s, up to " + maxTraceFor.String()}
		}
	}
	return t, q.sending(&t)
}

func (q query) sending(t *TraceRequest) (err error) {
	if text := q.values.Get("send"); text != "" {
		if t.Send, err = strconv.ParseBool(text); err != nil {
			return &parameterError{"send", "want true or false"}
		}
	}
	if t.Send && t.Packet.Protocol == desired.SCTP {
		return &parameterError{"send", "want protocol TCP or UDP"}
	}
	if t.NetNS, err = q.text("netns"); err == nil && t.NetNS != "" && !t.Send {
		return &parameterError{"netns", "is where the packet is sent from: want send=true"}
	}
	return err
}
