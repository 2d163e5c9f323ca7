package debughttp

import (
	"bufio"
	"encoding/json"
	"net/http"

	"k8s.io/apimachinery/pkg/types"
)

// report writes all there is as one document, for a file: what status, syncs and, for each Service,
// service answer. It is written Service by Service, as it may be long.
func (h *handler) report(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Disposition", `attachment; filename="serviceplane.json"`)
	if r.Method == http.MethodHead {
		return
	}
	status, now := h.source.Status(), h.resolved()
	d := document{Writer: bufio.NewWriter(w), failures: failuresOf(&status), now: &now}
	d.field(`{"status":`, h.statusOf(&status, maxLimit))
	d.field(`,"syncs":`, converted(h.source.History(), syncOf))
	separator := `,"services":[`
	for _, s := range h.index.services(now) {
		d.service(separator, s.name)
		separator = ",\n"
	}
	if separator != ",\n" {
		d.text(separator)
	}
	d.text("]}\n")
	if d.err == nil {
		d.err = d.Flush()
	}
	if d.err != nil { // the client is gone; it must not take the part for the whole
		panic(http.ErrAbortHandler)
	}
}

// document is a JSON document that is being written. After an error it writes nothing.
type document struct {
	*bufio.Writer

	failures failures
	now      *resolved
	err      error
}

func (d *document) service(before string, name types.NamespacedName) {
	d.field(before, d.now.inFull(name, d.failures))
}

func (d *document) field(before string, value any) {
	d.text(before)
	content, err := json.Marshal(value)
	if d.err == nil {
		d.err = err
	}
	d.text(string(content))
}

func (d *document) text(text string) {
	if d.err == nil {
		_, d.err = d.WriteString(text)
	}
}
