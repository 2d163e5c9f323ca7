package apitest

import (
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Objects are written one at a time: with versions, generations, a status of their own, and the conflicts of an API
// server.
func TestObjectsAreWritten(t *testing.T) {
	s := New(t, Options{
		Resources: []Resource{{schema.GroupVersionKind{Group: "example.org", Version: "v1", Kind: "Thing"}, "things"}},
		Admit: func(_, after *unstructured.Unstructured) error {
			if size, _, _ := unstructured.NestedInt64(after.Object, "spec", "size"); size > 9 {
				return errors.New("too large")
			}
			return nil
		},
	})
	events := watchURL(t, s.URL()+"/apis/example.org/v1/things?watch=true&resourceVersion=1")
	const all, one = "/apis/example.org/v1/namespaces/test/things", "/apis/example.org/v1/namespaces/test/things/a"
	for i, step := range []struct {
		method, path, body, want string
	}{
		{"GET", one, "", "404"},
		{"PUT", one, `{"metadata":{"name":"a"}}`, "404"},
		{"POST", all, `{"metadata":{"name":"a"},"spec":{"size":10}}`, "422 too large"},
		{"POST", all, `{"metadata":{"name":"a"},"spec":{"size":1,"color":"red"},"status":{"old":1}}`, `201 "generation":1 "size":1 !status`},
		{"POST", all, `{"metadata":{"name":"a"}}`, "409"},
		{"POST", all, `{`, "400"},
		{"PUT", one + "/status", `{"metadata":{"name":"a"},"spec":{"size":7},"status":{"ready":true}}`, `200 "generation":1 "size":1 "ready":true`},
		{"PUT", one, `{"metadata":{"name":"a","resourceVersion":"2"},"spec":{"size":2}}`, "409"},
		{"PUT", one, `{"metadata":{"name":"a","resourceVersion":"3"},"spec":{"size":2,"color":"red"}}`, `200 "generation":2 "size":2 "ready":true`},
		{"PATCH", one, `{"spec":{"color":null,"shape":"round"}}`, `200 "generation":3 "size":2 "shape":"round" !red`},
		{"PATCH", one, `{"spec":{"size":12}}`, "422 too large"},
		{"PATCH", one, `{"metadata":{"resourceVersion":"4"},"spec":{"size":3}}`, "409"},
		{"PATCH", one, `{"metadata":{"labels":{"a":"b"}}}`, `200 "generation":3 "labels":{"a":"b"}`},
		{"GET", one, "", `200 "generation":3 "resourceVersion":"6"`},
		{"GET", "/apis/example.org/v1/namespaces/other/things", "", `200 "items":[]`},
		{"GET", all, "", `200 "kind":"ThingList" "name":"a"`},
		{"DELETE", one, "", "200"},
		{"DELETE", one, "", "404"},
		{"GET", all, "", `200 "items":[]`},
	} {
		code, body := send(t, step.method, s.URL()+step.path, "application/json", step.body)
		words := strings.Fields(step.want)
		if code != words[0] {
			t.Errorf("step %d: %s %s = %s %s, want %s", i, step.method, step.path, code, body, step.want)
		}
		for _, word := range words[1:] {
			absent, not := strings.CutPrefix(word, "!")
			if strings.Contains(body, absent) == not {
				t.Errorf("step %d: %s %s = %s, want %s", i, step.method, step.path, body, word)
			}
		}
	}
	events.want(t, "ADDED Thing a 2", "MODIFIED Thing a 3", "MODIFIED Thing a 4", "MODIFIED Thing a 5", "MODIFIED Thing a 6", "DELETED Thing a 7")
}

func send(t *testing.T, method, url, contentType, body string) (code, answer string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", contentType)
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(response.Status)[0], string(text)
}

// TestPodsAreMerged: a strategic merge patch changes one condition, and keeps the others.
func TestPodsAreMerged(t *testing.T) {
	s := New(t, Options{})
	s.Put(t, &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "a"},
		Status:     v1.PodStatus{Conditions: []v1.PodCondition{{Type: "A", Status: "True"}, {Type: "B", Status: "False", Reason: "Old"}}},
	})
	code, body := send(t, "PATCH", s.URL()+"/api/v1/namespaces/test/pods/a/status", "application/strategic-merge-patch+json", `{"status":{"conditions":[{"type":"B","status":"True"},{"type":"C","status":"True"}]}}`)
	var p v1.Pod
	if err := json.Unmarshal([]byte(body), &p); err != nil || code != "200" {
		t.Fatalf("PATCH = %s %s, %v", code, body, err)
	}
	got := map[v1.PodConditionType]string{}
	for _, c := range p.Status.Conditions {
		got[c.Type] = string(c.Status) + c.Reason
	}
	if want := map[v1.PodConditionType]string{"A": "True", "B": "TrueOld", "C": "True"}; !maps.Equal(got, want) {
		t.Errorf("conditions are %v, want %v", got, want)
	}
}
