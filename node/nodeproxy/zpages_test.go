package nodeproxy

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// askZ asks for a page with an Accept header.
func askZ(t *testing.T, z http.Handler, accept ...string) *httptest.ResponseRecorder {
	t.Helper()
	w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	r.Header["Accept"] = accept
	z.ServeHTTP(w, r)
	return w
}

// The z-pages negotiate like those of Kubernetes' components (KEP-4827, KEP-4828).
func TestZPagesNegotiate(t *testing.T) {
	const deprecated = `299 - "This version of the flagz endpoint is deprecated. Please use a newer version."`
	z := read(t).flagz()
	for accept, want := range map[string]struct {
		code                       int
		contentType, body, warning string
	}{
		"":                         {200, plainText, "\nnodeproxy flagz\nWarning: This endpoint is not meant to be machine parseable", ""},
		"*/*":                      {200, plainText, "\nnodeproxy flagz\n", ""},
		"text/*":                   {200, plainText, "\nnodeproxy flagz\n", ""},
		"text/plain;charset=utf-8": {200, plainText, "\nnodeproxy flagz\n", ""},
		"application/xml":          {406, plainText, "v=v1beta1;as=Flagz", ""},
		"application/json":         {406, plainText, "", ""},
		"application/json;v=v1beta1;g=config.k8s.io":                            {406, plainText, "", ""},
		"application/json;v=v1beta1;g=config.k8s.io;as=Statusz":                 {406, plainText, "", ""},
		"application/json;v=v2;g=config.k8s.io;as=Flagz":                        {406, plainText, "", ""},
		"application/json;v=foo;g=config.k8s.io;as=Flagz,*/*":                   {200, plainText, "\nnodeproxy flagz\n", ""},
		"application/json;v=v1beta1;g=config.k8s.io;as=Flagz":                   {200, typeJSON, `"apiVersion":"config.k8s.io/v1beta1"`, ""},
		"application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz":                   {200, typeYAML, "apiVersion: config.k8s.io/v1beta1\n", ""},
		"application/json;v=v1alpha1;g=config.k8s.io;as=Flagz":                  {200, typeJSON, `"apiVersion":"config.k8s.io/v1alpha1"`, deprecated},
		"text/plain;q=0.5, application/json;v=v1beta1;g=config.k8s.io;as=Flagz": {200, typeJSON, `"kind":"Flagz"`, ""},
		"application/json;v=v1beta1;g=config.k8s.io;as=Flagz;q=0, text/plain":   {200, plainText, "", ""},
		"application/json;v=v1beta1;g=config.k8s.io;as=Flagz;q=x":               {406, plainText, "", ""},
		";;": {406, plainText, "", ""},
	} {
		w := askZ(t, z, accept)
		if w.Code != want.code || w.Header().Get("Content-Type") != want.contentType || !strings.Contains(w.Body.String(), want.body) || w.Header().Get("Warning") != want.warning {
			t.Errorf("Accept: %s: %d, %v,\n%s\nwant %+v", accept, w.Code, w.Header(), w.Body, want)
		}
	}
}

// The page /flagz has all flags with their values.
func TestFlagz(t *testing.T) {
	o := read(t, "--instance=edge", "--vmodule=a=1")
	o.flags = map[string]string{"instance": "edge", "vmodule": "a=1"}
	if got := askZ(t, o.flagz()).Body.String(); !strings.HasSuffix(got, "debugging purposes only.\n\ninstance=edge\nvmodule=a=1\n") {
		t.Errorf("text:\n%s", got)
	}
	want := map[string]any{
		"kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": map[string]any{"name": "nodeproxy"},
		"flags": map[string]any{"instance": "edge", "vmodule": "a=1"},
	}
	for contentType, decode := range map[string]func([]byte, any) error{typeJSON: json.Unmarshal, typeYAML: yaml.Unmarshal} {
		var got map[string]any
		if err := decode(askZ(t, o.flagz(), contentType+";v=v1beta1;g=config.k8s.io;as=Flagz").Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", contentType, diff)
		}
	}
}

func TestStatusz(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := statusz(time.Now(), []string{"/healthz", "/metrics"})
		time.Sleep(time.Hour + 2*time.Minute + 3*time.Second)
		text := askZ(t, z).Body.String()
		pattern := `(?s)^\nnodeproxy statusz\nWarning: .*\n\nStarted: Sat Jan  1 00:00:00 UTC 2000\nUp: 1 hr 02 min 03 sec\nGo version: ` +
			regexp.QuoteMeta(runtime.Version()) + `\nBinary version: .+\n\nPaths: /healthz /metrics\n$`
		if !regexp.MustCompile(pattern).MatchString(text) {
			t.Errorf("text:\n%s", text)
		}
		var got map[string]any
		if err := json.Unmarshal(askZ(t, z, "application/json;v=v1beta1;g=config.k8s.io;as=Statusz").Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		want := map[string]any{
			"kind": "Statusz", "apiVersion": "config.k8s.io/v1beta1", "metadata": map[string]any{"name": "nodeproxy"}, "startTime": "2000-01-01T00:00:00Z",
			"uptimeSeconds": 3723.0, "goVersion": runtime.Version(), "binaryVersion": buildVersion(), "paths": []any{"/healthz", "/metrics"},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("object (-want +got):\n%s", diff)
		}
	})
}
