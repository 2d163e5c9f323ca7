package debughttp

import (
	"encoding/json"
	"iter"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/answers"
)

// watchPeriod is how often a watch looks for changes. heartbeat is how often it sends
// something, so that it notices that its client is gone.
const (
	watchPeriod = 200 * time.Millisecond
	heartbeat   = 30 * time.Second
)

// The types of an answers.Event.
const (
	eventWatching = "watching" // at the start, and every 30 s
	eventAdded    = "added"
	eventChanged  = "changed"
	eventRemoved  = "removed"
)

// watch sends changes, one JSON object a line, until the client is gone.
func (h *handler) watch(w http.ResponseWriter, r *http.Request) {
	stream := &stream{http.NewResponseController(w), json.NewEncoder(w)}
	_ = stream.SetReadDeadline(time.Time{}) // the server's would end the request; recorders have none
	w.Header().Set("Content-Type", "application/x-ndjson")
	if r.Method == http.MethodHead {
		return
	}
	before := h.watched()
	looks := time.NewTicker(watchPeriod)
	defer looks.Stop()
	for last := (time.Time{}); ; {
		if time.Since(last) >= heartbeat {
			if last = time.Now(); stream.send(&answers.Event{Time: moment(last), Type: eventWatching}) != nil {
				return
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-looks.C:
		}
		for family, after := range h.watched() {
			for event := range changes(before[family], after) {
				if stream.send(&event) != nil {
					return
				}
			}
			before[family] = after
		}
	}
}

// watched returns the State of each IP family that has one.
func (h *handler) watched() map[v1.IPFamily]*changetracker.State {
	all := map[v1.IPFamily]*changetracker.State{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		if state := h.source.Programmed(family); state != nil {
			all[family] = state
		}
	}
	return all
}

// stream sends lines that arrive at once.
type stream struct {
	*http.ResponseController
	lines *json.Encoder
}

func (s *stream) send(event *answers.Event) error {
	_ = s.SetWriteDeadline(time.Now().Add(heartbeat)) // of this line; recorders have none
	if err := s.lines.Encode(event); err != nil {
		return err
	}
	return s.Flush()
}

// changes returns what differs between two States; before may be nil.
func changes(before, after *changetracker.State) iter.Seq[answers.Event] {
	return func(yield func(answers.Event) bool) {
		if before == after {
			return // most of the time
		}
		now, seen := moment(time.Now()), map[types.NamespacedName]bool{}
		for name := range after.Changed(before) {
			if seen[name] {
				continue
			}
			seen[name] = true
			for event := range changesOf(name, before, after) {
				if event.Time = now; !yield(event) {
					return
				}
			}
		}
	}
}

// changesOf returns the changes of the service ports of one Service.
func changesOf(name types.NamespacedName, before, after *changetracker.State) iter.Seq[answers.Event] {
	return func(yield func(answers.Event) bool) {
		for _, name := range after.ServicePorts(name) {
			if event, ok := change(name, before, after); ok && !yield(event) {
				return
			}
		}
		if before == nil {
			return
		}
		for _, name := range before.ServicePorts(name) {
			port, _ := before.Service(name)
			if _, ok := after.Service(name); !ok && !yield(eventOf(eventRemoved, port, before.Endpoints(name))) {
				return
			}
		}
	}
}

func eventOf(kind string, port *changetracker.ServicePort, endpoints []changetracker.Endpoint) answers.Event {
	text := portText(port, endpoints)
	return answers.Event{Type: kind, Namespace: port.Name.Namespace, Name: port.Name.Name, ServicePort: &text}
}

// change returns the change of one service port, which after has.
func change(name changetracker.ServicePortName, before, after *changetracker.State) (e answers.Event, ok bool) {
	var oldPort *changetracker.ServicePort
	var old []changetracker.Endpoint
	kind := eventAdded
	if before != nil {
		if oldPort, ok = before.Service(name); ok {
			kind, old = eventChanged, before.Endpoints(name)
		}
	}
	port, _ := after.Service(name)
	endpoints := after.Endpoints(name)
	e = eventOf(kind, port, endpoints)
	view := after.For(after.Node())
	for i := range endpoints {
		if was, ok := find(old, &endpoints[i]); !ok || !was.Equal(&endpoints[i]) {
			e.EndpointsAdded = append(e.EndpointsAdded, endpointOf(&endpoints[i], view.Local(&endpoints[i])))
		}
	}
	for i := range old {
		if _, ok := find(endpoints, &old[i]); !ok {
			e.EndpointsRemoved = append(e.EndpointsRemoved, old[i].Addr.String())
		}
	}
	return e, oldPort == nil || !oldPort.Equal(port) || len(e.EndpointsAdded)+len(e.EndpointsRemoved) > 0
}

// find returns the endpoint with an address.
func find(endpoints []changetracker.Endpoint, like *changetracker.Endpoint) (*changetracker.Endpoint, bool) {
	i, ok := slices.BinarySearchFunc(endpoints, like, func(e changetracker.Endpoint, like *changetracker.Endpoint) int {
		return e.Addr.Compare(like.Addr)
	})
	if !ok {
		return nil, false
	}
	return &endpoints[i], true
}
