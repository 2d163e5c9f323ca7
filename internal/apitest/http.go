package apitest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// ServeHTTP answers lists and watches, and requests for one object.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.options.Warning != "" {
		w.Header().Set("Warning", fmt.Sprintf("299 - %q", s.options.Warning))
	}
	t, known := s.parsePath(r.URL.Path)
	hidden, forbidden := s.lacks(t.Name)
	if !known || hidden {
		answerStatus(w, apierrors.NewNotFound(schema.GroupResource{Resource: path.Base(r.URL.Path)}, ""))
		return
	}
	if forbidden {
		s.record("FORBIDDEN", t.Name, r.URL.Query())
		answerStatus(w, apierrors.NewForbidden(t.groupResource(), "", errors.New("no role")))
		return
	}
	if t.name != "" || r.Method == http.MethodPost {
		s.object(w, r, t)
		return
	}
	query := r.URL.Query()
	wanted, err := parseSelection(query)
	if err != nil {
		answerStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	wanted.namespace = t.namespace
	if query.Get("watch") == "true" || query.Get("watch") == "1" {
		s.record("WATCH", t.Name, query)
		s.watch(w, r, t.Resource, wanted)
		return
	}
	s.record("LIST", t.Name, query)
	s.list(w, r, t.Resource, wanted)
}

// Change serves other resources from now on: see Options.Hidden and Options.Forbidden. Watches that run go on.
func (s *Server) Change(hidden, forbidden []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options.Hidden, s.options.Forbidden = hidden, forbidden
}

func (s *Server) lacks(resource string) (hidden, forbidden bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.options.Hidden, resource), slices.Contains(s.options.Forbidden, resource)
}

func parseSelection(query url.Values) (selection, error) {
	l, err := labels.Parse(query.Get("labelSelector"))
	if err != nil {
		return selection{}, err
	}
	f, err := fields.ParseSelector(query.Get("fieldSelector"))
	return selection{labels: l, fields: f}, err
}

func answerStatus(w http.ResponseWriter, err *apierrors.StatusError) {
	status := statusOf(err)
	answerJSON(w, int(status.Code), status)
}

func answerJSON(w http.ResponseWriter, code int, answer any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer) // the client may be gone
}

// statusOf returns an error as an object for clients.
func statusOf(err *apierrors.StatusError) metav1.Status {
	status := err.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	return status
}

// list is the response to a list request.
type list struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []runtime.Object `json:"items"`
}

func (s *Server) list(w http.ResponseWriter, r *http.Request, resource Resource, wanted selection) {
	items, version := s.selected(resource.Name, wanted)
	if b := s.binaryFor(r, resource); b != nil {
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_ = b.list(w, resource, items, version) // the client may be gone
		return
	}
	answer := list{Items: items}
	answer.APIVersion, answer.Kind = resource.GroupVersion().WithKind(resource.Kind + "List").ToAPIVersionAndKind()
	answer.ResourceVersion = strconv.FormatUint(version, 10)
	answerJSON(w, http.StatusOK, answer)
}

// selected returns the objects that match, in the order of their names, and their version.
func (s *Server) selected(resource string, wanted selection) ([]runtime.Object, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	items := []runtime.Object{}
	for _, name := range slices.Sorted(maps.Keys(s.stored[resource])) {
		if o := s.stored[resource][name]; wanted.matches(o) {
			items = append(items, o)
		}
	}
	return items, s.version
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource Resource, wanted selection) {
	query := r.URL.Query()
	initial := query.Get("sendInitialEvents") == "true"
	if initial && (!s.options.WatchList || query.Get("resourceVersionMatch") != string(metav1.ResourceVersionMatchNotOlderThan)) {
		answerStatus(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil))
		return
	}
	version, err := strconv.ParseUint(query.Get("resourceVersion"), 10, 64)
	fresh := err != nil || version == 0
	st := &stream{
		Server: s, out: w, resource: resource, wanted: wanted, seen: version,
		bookmarks: query.Get("allowWatchBookmarks") == "true", binary: s.binaryFor(r, resource),
	}
	w.Header().Set("Content-Type", "application/json")
	if st.binary != nil {
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	}
	switch {
	case initial:
		st.sendInitial()
		st.sendBookmark(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	case fresh:
		st.sendInitial()
	case s.expired(version):
		st.sendExpired()
		return
	}
	ctx := r.Context()
	if seconds, err := strconv.Atoi(query.Get("timeoutSeconds")); err == nil {
		limited, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
		ctx = limited
	}
	st.follow(ctx)
}

// stream is one watch. It ends with the client's request.
type stream struct {
	*Server
	out       http.ResponseWriter
	resource  Resource
	wanted    selection
	bookmarks bool
	binary    *binary // nil for JSON
	seen      uint64  // the version of the last change that was checked
	failed    bool
}

// event is one line of a watch.
type event struct {
	Type   watch.EventType `json:"type"`
	Object runtime.Object  `json:"object"`
}

func (s *stream) send(typ watch.EventType, object runtime.Object) {
	if s.failed {
		return
	}
	if s.binary != nil {
		s.failed = s.binary.event(s.out, typ, object) != nil
		return
	}
	s.failed = json.NewEncoder(s.out).Encode(event{typ, object}) != nil
}

// sendInitial sends all objects as added.
func (s *stream) sendInitial() {
	items, version := s.selected(s.resource.Name, s.wanted)
	for _, item := range items {
		s.send(watch.Added, item)
	}
	s.seen = version
}

// sendBookmark sends the version up to which the client has received all changes.
func (s *stream) sendBookmark(annotations map[string]string) {
	if !s.bookmarks {
		return
	}
	meta := metav1.ObjectMeta{ResourceVersion: strconv.FormatUint(s.seen, 10), Annotations: annotations}
	mark := &metav1.PartialObjectMetadata{ObjectMeta: meta}
	mark.SetGroupVersionKind(s.resource.GroupVersionKind)
	s.send(watch.Bookmark, mark)
}

// sendExpired ends a watch whose next change was compacted.
func (s *stream) sendExpired() {
	status := statusOf(apierrors.NewResourceExpired("too old resource version: " + strconv.FormatUint(s.seen, 10)))
	s.send(watch.Error, &status)
}

// follow sends changes until the request ends.
func (s *stream) follow(ctx context.Context) {
	for !s.failed && ctx.Err() == nil {
		s.failed = s.failed || http.NewResponseController(s.out).Flush() != nil
		changes, more, lost := s.since()
		if lost {
			s.sendExpired()
			return
		}
		if len(changes) > 0 {
			s.sendChanges(changes)
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
		}
	}
}

// since returns the changes that were not checked yet, a channel that is closed at the
// next one, and whether some were compacted.
func (s *stream) since() (changes []change, more <-chan struct{}, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, _ := slices.BinarySearchFunc(s.history, s.seen+1, func(c change, v uint64) int { return cmp.Compare(c.version, v) })
	return slices.Clone(s.history[i:]), s.changed, s.seen < s.compacted
}

// sendChanges sends the changes that the client selects. If there are none, it sends a
// bookmark, so that the client's version does not expire.
func (s *stream) sendChanges(changes []change) {
	sent := false
	for _, c := range changes {
		if c.resource == s.resource.Name && s.sendChange(c) {
			sent = true
		}
	}
	s.seen = changes[len(changes)-1].version
	if !sent {
		s.sendBookmark(nil)
	}
}

// sendChange sends a change if the object matches the client's selection before or after.
func (s *stream) sendChange(c change) bool {
	before, after := s.wanted.matches(c.before), s.wanted.matches(c.after)
	switch {
	case before && after:
		s.send(watch.Modified, c.after)
	case after:
		s.send(watch.Added, c.after)
	case before:
		s.send(watch.Deleted, c.lastSeen())
	}
	return before || after
}
