package apitest

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestProtobuf: clients that accept it get lists and watches in protobuf, with what clients wrote as
// JSON, and bookmarks.
func TestProtobuf(t *testing.T) {
	s := New(t, Options{Protobuf: true, WatchList: true})
	scheme := runtime.NewScheme()
	if err := v1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	metav1.AddToGroupVersion(scheme, v1.SchemeGroupVersion)
	config := &rest.Config{Host: s.URL(), APIPath: "/api", ContentConfig: rest.ContentConfig{
		GroupVersion: &v1.SchemeGroupVersion, NegotiatedSerializer: serializer.NewCodecFactory(scheme).WithoutConversion(),
	}}
	clients := map[string]*rest.RESTClient{}
	for _, c := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		config.ContentType, config.AcceptContentTypes = c, c
		client, err := rest.RESTClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Client.CloseIdleConnections)
		clients[c] = client
	}
	web := proxiertest.Service("default", "web", proxiertest.ClusterIPs("10.96.0.1"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	s.Put(t, web)
	written := proxiertest.Service("default", "written", proxiertest.ClusterIPs("10.96.0.2"), proxiertest.Port("http", v1.ProtocolTCP, 81))
	written.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	if err := clients[runtime.ContentTypeJSON].Post().Namespace("default").Resource("services").Body(written).Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	binary := clients[runtime.ContentTypeProtobuf]
	var kind string
	var all v1.ServiceList
	if err := binary.Get().Resource("services").Do(t.Context()).ContentType(&kind).Into(&all); err != nil {
		t.Fatal(err)
	}
	if kind != runtime.ContentTypeProtobuf || len(all.Items) != 2 || all.Items[0].Spec.ClusterIP != "10.96.0.1" || all.Items[1].Spec.Ports[0].Port != 81 || all.ResourceVersion == "" {
		t.Errorf("the list is %s: %+v", kind, all)
	}
	w, err := binary.Get().Resource("services").Param("watch", "true").Param("sendInitialEvents", "true").Param("allowWatchBookmarks", "true").
		Param("resourceVersionMatch", "NotOlderThan").Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	var got []string
	next := func() {
		e := <-w.ResultChan()
		service, ok := e.Object.(*v1.Service)
		if !ok || service.ResourceVersion == "" {
			t.Fatalf("event %+v, want a Service with a version", e)
		}
		got = append(got, string(e.Type)+" "+service.Name+service.Annotations[metav1.InitialEventsAnnotationKey])
	}
	next()
	next()
	next()
	s.Delete(t, web)
	next()
	if want := []string{"ADDED web", "ADDED written", "BOOKMARK true", "DELETED web"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}
