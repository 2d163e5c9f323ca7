package debughttp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// The number of items of a list in a response.
const (
	defaultLimit = 100
	maxLimit     = 1000
)

// maxTextBytes limits parameters. errorBytes limits errors, since a sync may fail for
// each of thousands of Services.
const (
	maxTextBytes = 256
	errorBytes   = 2000
)

// answer returns the value to send as JSON.
type answer func(r *http.Request, q query) (any, error)

func (a answer) serve(w http.ResponseWriter, r *http.Request) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		writeError(w, http.StatusBadRequest, "parse query: "+err.Error())
		return
	}
	value, err := a(r, query{values})
	if err != nil {
		if errors.Is(err, errBusy) {
			w.Header().Set("Retry-After", "1")
		}
		writeError(w, statusOf(err), strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	writeJSON(w, http.StatusOK, value)
}

var errNotFound = errors.New("no programmed Service has this name")

func statusOf(err error) int {
	var parameter *parameterError
	switch {
	case errors.As(err, &parameter), errors.Is(err, desired.ErrPacket):
		return http.StatusBadRequest
	case errors.Is(err, errNotFound):
		return http.StatusNotFound
	case errors.Is(err, proxier.ErrNotProgrammed), errors.Is(err, errBusy), errors.Is(err, runner.ErrEnded):
		return http.StatusServiceUnavailable
	case errors.Is(err, errors.ErrUnsupported):
		return http.StatusNotImplemented
	default:
		return http.StatusInternalServerError
	}
}

func writeError(w http.ResponseWriter, status int, text string) {
	writeJSON(w, status, answers.Error{Error: text})
}

// writeJSON writes a value, or an error if the value cannot be encoded.
func writeJSON(w http.ResponseWriter, status int, value any) {
	content, err := json.Marshal(value)
	if err != nil {
		status, content = http.StatusInternalServerError, []byte(`{"error":"encode response"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(content)+1))
	w.WriteHeader(status)
	_, _ = w.Write(append(content, '\n')) // fails only if the client is gone
}

// parameterError is the error of an invalid parameter.
type parameterError struct{ name, want string }

func (e *parameterError) Error() string { return "parameter " + e.name + ": " + e.want }

// query holds the parameters of a request.
type query struct{ values url.Values }

// text returns a parameter; empty if it is missing.
func (q query) text(name string) (string, error) {
	text := q.values.Get(name)
	if len(text) > maxTextBytes {
		return "", &parameterError{name, fmt.Sprintf("longer than %d bytes", maxTextBytes)}
	}
	return text, nil
}

// number returns a numeric parameter, or the fallback if it is missing.
func (q query) number(name string, fallback, least, most int) (int, error) {
	text := q.values.Get(name)
	if text == "" {
		return fallback, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, &parameterError{name, fmt.Sprintf("want a number from %d to %d", least, most)}
	}
	return n, nil
}

func (q query) limit() (int, error) { return q.number("limit", defaultLimit, 1, maxLimit) }

// converted never returns nil, which JSON encodes as null.
func converted[S, T any](list []S, convert func(S) T) []T {
	all := make([]T, len(list))
	for i := range list {
		all[i] = convert(list[i])
	}
	return all
}

// texts converts values to their texts.
func texts[S fmt.Stringer](list []S) []string { return converted(list, S.String) }

func errorText(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	if len(text) <= errorBytes {
		return text
	}
	end := errorBytes
	for end > errorBytes-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}

// moment converts a time to UTC, except the zero time.
func moment(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}
