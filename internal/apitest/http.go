package apitest

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// ServeHTTP answers lists and watches.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind, known := listKinds()[r.URL.Path]
	resource := path.Base(r.URL.Path)
	if !known || r.Method != http.MethodGet || slices.Contains(s.options.Hidden, resource) {
		answerStatus(w, apierrors.NewNotFound(schema.GroupResource{Resource: resource}, ""))
		return
	}
	query := r.URL.Query()
	wanted, err := parseSelection(query)
	if err != nil {
		answerStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	if query.Get("watch") == "true" || query.Get("watch") == "1" {
		s.watch(w, r, resource, wanted)
		return
	}
	s.list(w, resource, kind, wanted)
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
	status := err.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status) // the client may be gone
}

// list is a resource's objects as the client gets them.
type list struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []runtime.Object `json:"items"`
}

func (s *Server) list(w http.ResponseWriter, resource string, kind schema.GroupVersionKind, wanted selection) {
	s.mu.Lock()
	s.requests = append(s.requests, "LIST "+resource)
	items, version := s.selected(resource, wanted)
	s.mu.Unlock()
	answer := list{Items: items}
	answer.APIVersion, answer.Kind = kind.ToAPIVersionAndKind()
	answer.ResourceVersion = strconv.FormatUint(version, 10)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // the client may be gone
}

// selected returns the objects that match, and the version that they are of. The
// lock is held.
func (s *Server) selected(resource string, wanted selection) ([]runtime.Object, uint64) {
	items := []runtime.Object{}
	for _, object := range s.stored[resource] {
		if wanted.matches(object) {
			items = append(items, object)
		}
	}
	return items, s.version
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource string, wanted selection) {
	query := r.URL.Query()
	initial := query.Get("sendInitialEvents") == "true"
	s.mu.Lock()
	s.requests = append(s.requests, "WATCH "+resource+"?sendInitialEvents="+strconv.FormatBool(initial))
	oldest := s.oldest
	s.mu.Unlock()
	if initial && !s.options.WatchList {
		answerStatus(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil))
		return
	}
	version, err := strconv.ParseUint(query.Get("resourceVersion"), 10, 64)
	fresh := err != nil || version == 0
	if !fresh && version < oldest {
		answerStatus(w, apierrors.NewResourceExpired("too old resource version"))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	st := &stream{Server: s, out: w, resource: resource, wanted: wanted, version: version}
	if initial || fresh {
		st.sendInitial()
	}
	if initial {
		st.sendBookmark()
	}
	st.follow(r.Context())
}

// stream is one watch. It ends with the client's request.
type stream struct {
	*Server
	out      http.ResponseWriter
	resource string
	wanted   selection
	version  uint64 // of the last change that was looked at
	failed   bool
}

// event is one line of a watch.
type event struct {
	Type   watch.EventType `json:"type"`
	Object any             `json:"object"`
}

func (s *stream) send(typ watch.EventType, object any) {
	s.failed = s.failed || json.NewEncoder(s.out).Encode(event{typ, object}) != nil
}

// sendInitial sends what there is as added.
func (s *stream) sendInitial() {
	s.mu.Lock()
	items, version := s.selected(s.resource, s.wanted)
	s.mu.Unlock()
	for _, item := range items {
		s.send(watch.Added, item)
	}
	s.version = version
}

// sendBookmark says that everything that there was has been sent.
func (s *stream) sendBookmark() {
	kind := bookmarkKinds()[s.resource]
	mark := metav1.PartialObjectMetadata{}
	mark.APIVersion, mark.Kind = kind.ToAPIVersionAndKind()
	mark.ResourceVersion = strconv.FormatUint(s.version, 10)
	mark.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	s.send(watch.Bookmark, mark)
}

// follow sends each change until the client is gone.
func (s *stream) follow(ctx context.Context) {
	for !s.failed {
		s.failed = s.failed || http.NewResponseController(s.out).Flush() != nil
		changes, more := s.since()
		for _, c := range changes {
			s.sendChange(c)
		}
		if len(changes) > 0 {
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
	}
}

// since returns the changes that were not looked at, and what is closed with the
// next one.
func (s *stream) since() ([]change, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, _ := slices.BinarySearchFunc(s.history, s.version+1, func(c change, v uint64) int { return cmp.Compare(c.version, v) })
	return slices.Clone(s.history[i:]), s.changed
}

func (s *stream) sendChange(c change) {
	s.version = c.version
	if c.resource != s.resource {
		return
	}
	before, after := s.wanted.matches(c.before), s.wanted.matches(c.after)
	switch {
	case before && after:
		s.send(watch.Modified, c.after)
	case after:
		s.send(watch.Added, c.after)
	case before:
		s.send(watch.Deleted, c.before)
	}
}
