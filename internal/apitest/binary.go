package apitest

import (
	"bytes"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"
)

// binary encodes lists and watches as protobuf, as API servers do for clients that accept it.
type binary struct {
	scheme  *runtime.Scheme
	objects *protobuf.Serializer
	events  *protobuf.RawSerializer
}

func newBinary(tb testing.TB) *binary {
	tb.Helper()
	scheme := newScheme(tb, v1.AddToScheme, discovery.AddToScheme, networking.AddToScheme)
	return &binary{scheme, protobuf.NewSerializer(scheme, scheme), protobuf.NewRawSerializer(scheme, scheme)}
}

// newScheme returns the types of API groups.
func newScheme(tb testing.TB, groups ...func(*runtime.Scheme) error) *runtime.Scheme {
	tb.Helper()
	scheme := runtime.NewScheme()
	for _, add := range groups {
		if err := add(scheme); err != nil {
			tb.Fatal(err)
		}
	}
	return scheme
}

// binaryFor returns nil if the client gets JSON.
func (s *Server) binaryFor(r *http.Request, resource Resource) *binary {
	if !s.options.Protobuf || !strings.Contains(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) || !s.binary.scheme.Recognizes(resource.GroupVersionKind) {
		return nil
	}
	return s.binary
}

// typed returns an object of its own type. A client's writes, and bookmarks, have none.
func (b *binary) typed(object runtime.Object) (runtime.Object, error) {
	switch object.(type) {
	case *unstructured.Unstructured, *metav1.PartialObjectMetadata:
	default:
		return object, nil
	}
	kind := object.GetObjectKind().GroupVersionKind()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return nil, err
	}
	typed, err := b.scheme.New(kind)
	if err != nil {
		return nil, err
	}
	err = runtime.DefaultUnstructuredConverter.FromUnstructured(fields, typed)
	typed.GetObjectKind().SetGroupVersionKind(kind)
	return typed, err
}

func (b *binary) list(w io.Writer, resource Resource, items []runtime.Object, version uint64) error {
	kind := resource.GroupVersion().WithKind(resource.Kind + "List")
	answer, err := b.scheme.New(kind)
	if err != nil {
		return err
	}
	answer.GetObjectKind().SetGroupVersionKind(kind)
	all := make([]runtime.Object, len(items))
	for i, item := range items {
		if all[i], err = b.typed(item); err != nil {
			return err
		}
	}
	if err := meta.SetList(answer, all); err != nil {
		return err
	}
	accessor, err := meta.ListAccessor(answer)
	if err != nil {
		return err
	}
	accessor.SetResourceVersion(strconv.FormatUint(version, 10))
	return b.objects.Encode(answer, w)
}

// event writes one event of a watch, behind its length.
func (b *binary) event(w io.Writer, typ watch.EventType, object runtime.Object) error {
	var encoded, frame bytes.Buffer
	object, err := b.typed(object)
	if err != nil {
		return err
	}
	if err := b.objects.Encode(object, &encoded); err != nil {
		return err
	}
	if err := b.events.Encode(&metav1.WatchEvent{Type: string(typ), Object: runtime.RawExtension{Raw: encoded.Bytes()}}, &frame); err != nil {
		return err
	}
	_, err = protobuf.LengthDelimitedFramer.NewFrameWriter(w).Write(frame.Bytes())
	return err
}
