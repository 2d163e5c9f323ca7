package apitest

import (
	"fmt"
	"io"
	"net/http"
	"reflect"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// object answers a request for one object, or the creation of one.
func (s *Server) object(w http.ResponseWriter, r *http.Request, t target) {
	s.writing.Lock() // so that a change is made of the object that is replaced
	defer s.writing.Unlock()
	sent, err := readObject(r)
	if err != nil {
		answerStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	if r.Method == http.MethodPost {
		t.name = sent.GetName()
	}
	before, refusal := s.current(t)
	if refusal == nil && before == nil && r.Method != http.MethodPost {
		refusal = apierrors.NewNotFound(t.groupResource(), t.name)
	}
	var after *unstructured.Unstructured
	if refusal == nil {
		after, refusal = t.next(r, before, sent)
	}
	if refusal == nil && after != nil && s.options.Admit != nil {
		if err := s.options.Admit(before, after); err != nil {
			refusal = apierrors.NewInvalid(t.GroupKind(), t.name, nil)
			refusal.ErrStatus.Message = err.Error()
		}
	}
	if refusal != nil {
		answerStatus(w, refusal)
		return
	}
	answer := runtime.Object(before)
	switch {
	case r.Method == http.MethodDelete:
		s.change(t.Name, t.key(), nil)
	case r.Method != http.MethodGet:
		s.change(t.Name, t.key(), after)
		answer = after
	}
	code := http.StatusOK
	if r.Method == http.MethodPost {
		code = http.StatusCreated
	}
	answerJSON(w, code, answer)
}

// readObject returns the object in a request; it is empty if there is none.
func readObject(r *http.Request) (*unstructured.Unstructured, error) {
	object := &unstructured.Unstructured{Object: map[string]any{}}
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Method == http.MethodGet || r.Method == http.MethodDelete {
		return object, err
	}
	return object, utiljson.Unmarshal(body, &object.Object) // numbers are int64, as in every API server
}

// current returns an object of the store, or nil.
func (s *Server) current(t target) (*unstructured.Unstructured, *apierrors.StatusError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stored := s.stored[t.Name][t.key()]
	if stored == nil {
		return nil, nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(stored)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	return &unstructured.Unstructured{Object: content}, nil
}

// next returns an object as a request changes it, nil if it is deleted or only read.
func (t target) next(r *http.Request, before, sent *unstructured.Unstructured) (*unstructured.Unstructured, *apierrors.StatusError) {
	if v := sent.GetResourceVersion(); v != "" && before != nil && v != before.GetResourceVersion() {
		return nil, apierrors.NewConflict(t.groupResource(), t.name, fmt.Errorf("version %s is not the latest", v))
	}
	switch r.Method {
	case http.MethodPost:
		if before != nil {
			return nil, apierrors.NewAlreadyExists(t.groupResource(), t.name)
		}
		return t.created(sent), nil
	case http.MethodPatch:
		merged := mergePatch(before.Object, sent.Object)
		if r.Header.Get("Content-Type") == string(types.StrategicMergePatchType) {
			var err error
			if merged, err = strategicpatch.StrategicMergeMapPatch(before.DeepCopy().Object, sent.Object, v1.Pod{}); err != nil { // only Pods are patched so
				return nil, apierrors.NewBadRequest(err.Error())
			}
		}
		return t.replaced(before, &unstructured.Unstructured{Object: merged}), nil
	case http.MethodPut:
		return t.replaced(before, sent), nil
	case http.MethodDelete, http.MethodGet:
		return nil, nil
	default:
		return nil, apierrors.NewMethodNotSupported(t.groupResource(), r.Method)
	}
}

func (t target) created(sent *unstructured.Unstructured) *unstructured.Unstructured {
	sent.SetGroupVersionKind(t.GroupVersionKind)
	sent.SetNamespace(t.namespace)
	sent.SetUID(types.UID(t.Name + "/" + t.key()))
	sent.SetCreationTimestamp(metav1.NewTime(time.Now()))
	sent.SetGeneration(1)
	delete(sent.Object, "status")
	return sent
}

// replaced returns the object with what the request may change: the status or everything else.
func (t target) replaced(before, sent *unstructured.Unstructured) *unstructured.Unstructured {
	after := before.DeepCopy()
	if t.sub != "" {
		after.Object["status"] = sent.Object["status"]
		return after
	}
	sent.SetGroupVersionKind(t.GroupVersionKind)
	for _, kept := range []string{"namespace", "uid", "creationTimestamp", "generation"} {
		value, _, _ := unstructured.NestedFieldNoCopy(before.Object, "metadata", kept)
		if value == nil {
			continue
		}
		_ = unstructured.SetNestedField(sent.Object, value, "metadata", kept) // metadata is there: it has the name
	}
	if status, ok := before.Object["status"]; ok {
		sent.Object["status"] = status
	}
	if !reflect.DeepEqual(before.Object["spec"], sent.Object["spec"]) {
		sent.SetGeneration(before.GetGeneration() + 1)
	}
	return sent
}

// mergePatch applies a JSON merge patch (RFC 7396).
func mergePatch(object, patch map[string]any) map[string]any {
	merged := runtime.DeepCopyJSON(object)
	for key, value := range patch {
		inner, isObject := value.(map[string]any)
		old, wasObject := merged[key].(map[string]any)
		switch {
		case value == nil:
			delete(merged, key)
		case isObject && wasObject:
			merged[key] = mergePatch(old, inner)
		default:
			merged[key] = value
		}
	}
	return merged
}
