package nodeproxy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"mime"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// flagValues returns all flags with their values.
func flagValues(f *pflag.FlagSet) map[string]string {
	values := map[string]string{}
	f.VisitAll(func(flag *pflag.Flag) { values[flag.Name] = flag.Value.String() })
	return values
}

// zpage is a page of Kubernetes' components: text for people, or an object of
// config.k8s.io for clients that ask for its kind (KEP-4827, KEP-4828).
type zpage struct {
	kind   string
	text   func() string
	object func() map[string]any // without its kind and its name
}

const (
	zpageGroup = "config.k8s.io"
	component  = "nodeproxy"

	plainText = "text/plain; charset=utf-8"
	typeJSON  = "application/json"
	typeYAML  = "application/yaml"

	zpageHeader = "\n%s %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n\n"
)

// zpageVersions are the versions of the objects, the newest first. Others are deprecated.
var zpageVersions = []string{"v1beta1", "v1alpha1"} // read-only

// flagz is the page /flagz.
func (o *options) flagz() zpage {
	return zpage{
		kind: "Flagz",
		text: func() string {
			var b strings.Builder
			for _, name := range slices.Sorted(maps.Keys(o.flags)) {
				fmt.Fprintf(&b, "%s=%s\n", name, o.flags[name])
			}
			return b.String()
		},
		object: func() map[string]any { return map[string]any{"flags": o.flags} },
	}
}

// statusz is the page /statusz of a process that began at a time and has the paths.
func statusz(began time.Time, paths []string) zpage {
	up := func() int64 { return int64(time.Since(began).Seconds()) }
	return zpage{
		kind: "Statusz",
		text: func() string {
			seconds := up()
			return fmt.Sprintf("Started: %s\nUp: %d hr %02d min %02d sec\nGo version: %s\nBinary version: %s\n\nPaths: %s\n",
				began.UTC().Format(time.UnixDate), seconds/3600, seconds/60%60, seconds%60, runtime.Version(), buildVersion(), strings.Join(paths, " "))
		},
		object: func() map[string]any {
			return map[string]any{
				"startTime": began.UTC().Format(time.RFC3339), "uptimeSeconds": up(),
				"goVersion": runtime.Version(), "binaryVersion": buildVersion(), "paths": paths,
			}
		},
	}
}

// ServeHTTP implements http.Handler.
func (z zpage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	contentType, version, ok := z.negotiate(r.Header.Values("Accept"))
	if !ok {
		http.Error(w, fmt.Sprintf("only these media types are accepted: text/plain, and %s or %s with ;g=%s;v=%s;as=%s", typeJSON, typeYAML, zpageGroup, zpageVersions[0], z.kind),
			http.StatusNotAcceptable)
		return
	}
	body := []byte(fmt.Sprintf(zpageHeader, component, strings.ToLower(z.kind)) + z.text())
	if contentType != plainText {
		var err error
		if body, err = z.encode(contentType, version); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		if version != zpageVersions[0] {
			w.Header().Set("Warning", fmt.Sprintf("299 - %q", "This version of the "+strings.ToLower(z.kind)+" endpoint is deprecated. Please use a newer version."))
		}
	}
	w.Header().Set("Content-Type", contentType)
	_, _ = w.Write(body) // the client may be gone
}

// encode returns the object in JSON or YAML.
func (z zpage) encode(contentType, version string) ([]byte, error) {
	object := z.object()
	object["kind"], object["apiVersion"], object["metadata"] = z.kind, zpageGroup+"/"+version, map[string]string{"name": component}
	if contentType == typeJSON {
		return json.Marshal(object)
	}
	return yaml.Marshal(object)
}

// accepted is a part of an Accept header.
type accepted struct {
	mediaType string
	params    map[string]string
	quality   float64
}

// negotiate returns the content type that the client prefers, and the version of the
// object. Without an Accept header, it is text. Anything else must name the group, the
// version and the kind.
func (z zpage) negotiate(headers []string) (contentType, version string, ok bool) {
	if strings.TrimSpace(strings.Join(headers, "")) == "" {
		return plainText, "", true
	}
	for _, a := range parseAccept(headers) {
		_, wantsObject := a.params["as"]
		switch a.mediaType {
		case "text/plain", "text/*", "*/*":
			if !wantsObject {
				return plainText, "", true
			}
		case typeJSON, typeYAML:
			if a.params["as"] == z.kind && a.params["g"] == zpageGroup && slices.Contains(zpageVersions, a.params["v"]) {
				return a.mediaType, a.params["v"], true
			}
		}
	}
	return "", "", false
}

// parseAccept returns what a client accepts, the best first (RFC 9110, section 12.5.1).
// Malformed parts are left out.
func parseAccept(headers []string) (all []accepted) {
	for part := range strings.SplitSeq(strings.Join(headers, ","), ",") {
		mediaType, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		a := accepted{mediaType, params, 1}
		if q, ok := params["q"]; ok {
			if a.quality, err = strconv.ParseFloat(q, 64); err != nil || math.IsNaN(a.quality) || a.quality <= 0 {
				continue
			}
		}
		all = append(all, a)
	}
	slices.SortStableFunc(all, func(a, b accepted) int { return cmp.Compare(b.quality, a.quality) })
	return all
}
