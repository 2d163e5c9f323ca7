package debughttp_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"

	"github.com/serviceplane/serviceplane/node/debughttp"
)

// The report is what the other answers are.
func TestReportIsAllInOne(t *testing.T) {
	h := judgedProxy(t)
	report := get(t, h, "/report", http.StatusOK)
	services, _ := at(t, report, "services").([]any)
	list := servicesOf(t, get(t, h, "/services", http.StatusOK))
	if len(services) != len(list) || len(list) != 7 {
		t.Fatalf("the report has %d Services, services %d, want 7", len(services), len(list))
	}
	for i, service := range services {
		one := get(t, h, "/service?namespace=shop&name="+at(t, service, "name").(string), http.StatusOK)
		if !reflect.DeepEqual(service, any(one)) {
			t.Errorf("%s in the report is\n%s\nwant\n%s", list[i], compact(t, service), compact(t, one))
		}
	}
	wantAt(t, report, `"no room"`, "services", 0, "servicePorts", 0, "error")
	wantAt(t, report, `1`, "status", "families", 0, "failedTotal")
	if syncs, _ := at(t, report, "syncs").([]any); len(syncs) == 0 {
		t.Error("the report has no syncs")
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, request(http.MethodHead, "/report"))
	if got := w.Header().Get("Content-Disposition"); got != `attachment; filename="serviceplane.json"` || w.Body.Len() != 0 {
		t.Errorf("HEAD the report has Content-Disposition %q and %d bytes", got, w.Body.Len())
	}
}

func TestReportBeforeTheFirstSync(t *testing.T) {
	a := get(t, debughttp.Handler(newProxy(t)), "/report", http.StatusOK)
	wantAt(t, a, `[]`, "services")
	wantAt(t, a, `[]`, "syncs")
	wantAt(t, a, `false`, "status", "synced")
}

// failingWriter is a client that goes away.
type failingWriter struct {
	http.ResponseWriter

	written int
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.written += len(p); w.written > 5000 {
		return 0, errors.New("broken pipe")
	}
	return w.ResponseWriter.Write(p)
}

func TestReportThatIsCutIsNoDocument(t *testing.T) {
	h := judgedProxy(t)
	recorder := httptest.NewRecorder()
	defer func() {
		if recover() != http.ErrAbortHandler { //nolint:errorlint // the value that net/http compares with
			t.Error("the handler went on")
		}
		if json.Valid(recorder.Body.Bytes()) {
			t.Error("the part is a document")
		}
	}()
	h.ServeHTTP(&failingWriter{ResponseWriter: recorder}, request(http.MethodGet, "/report"))
}
