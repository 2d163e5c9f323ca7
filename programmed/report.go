package programmed

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Report is what a node has programmed, and in JSON the answer of Handler.
type Report struct {
	Node string `json:"node"`
	// Time is the node's clock when it answered.
	Time     time.Time              `json:"time"`
	Families map[v1.IPFamily]Family `json:"families"`
}

// Family is the part of one IP family.
type Family struct {
	// Services and EndpointSlices are resourceVersions: every change of these objects up to
	// them is programmed, but for the service ports in Failed. They are empty if Error is not.
	Services       string `json:"services,omitempty"`
	EndpointSlices string `json:"endpointSlices,omitempty"`
	// Error is why the node cannot say what is programmed.
	Error string `json:"error,omitempty"`
	// Failed are the service ports that are not as they should be.
	Failed []Failure `json:"failed,omitempty"`
	// Unlisted is how many failures are not in Failed.
	Unlisted int `json:"unlisted,omitempty"`
}

// Failure is a service port that is not programmed as it should be.
type Failure struct {
	Namespace string      `json:"namespace"`
	Service   string      `json:"service"`
	Port      string      `json:"port,omitempty"`
	Protocol  v1.Protocol `json:"protocol"`
	Since     time.Time   `json:"since"`
	Error     string      `json:"error"`
}

// NewReport returns the Report of a node with the Status of its Provider.
func NewReport(node string, status proxier.Status, now time.Time) Report {
	r := Report{Node: node, Time: now, Families: make(map[v1.IPFamily]Family, len(status.Families))}
	for name, s := range status.Families {
		f := Family{Services: s.Versions.Services, EndpointSlices: s.Versions.EndpointSlices}
		if s.Versions == (changetracker.Versions{}) {
			f.Error = unknown(&s)
		} else if err := noOrder(s.Versions); err != nil {
			f = Family{Error: err.Error()}
		}
		for _, e := range s.Failed {
			f.Failed = append(f.Failed, Failure{
				Namespace: e.Name.Namespace, Service: e.Name.Name, Port: e.Name.Port, Protocol: e.Name.Protocol,
				Since: e.Since, Error: e.Err.Error(),
			})
		}
		r.Families[name] = f
	}
	return r
}

// unknown returns why a family has no Versions.
func unknown(s *proxier.FamilyStatus) string {
	switch {
	case s.Repairing && s.Damaged > 0:
		return "another program changed our kernel objects, they are not repaired yet: " + s.LastDamage.String()
	case s.Repairing:
		return "another program may have changed our kernel objects, the sync that repairs them has not ended"
	case s.LastError != nil:
		return "the last sync failed: " + s.LastError.Error()
	case !s.Synced:
		return "nothing is programmed yet"
	}
	return "no resourceVersion is known: the source of Services and EndpointSlices does not call OnVersion, as informer.Run does"
}

// Handler answers with the Report of a node. With the query "service=NAMESPACE/NAME", Failed
// lists only the service ports of that Service. status is that of a Provider.
func Handler(node string, status func() proxier.Status) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		report := NewReport(node, status(), time.Now())
		if service := r.URL.Query().Get("service"); service != "" {
			report.keep(service)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_ = json.NewEncoder(w).Encode(report) // the client may have disconnected
	})
}

// keep drops the failures of all other Services.
func (r *Report) keep(service string) {
	for name, f := range r.Families {
		f.Failed = slices.DeleteFunc(f.Failed, func(e Failure) bool { return e.Namespace+"/"+e.Service != service })
		r.Families[name] = f
	}
}

// Limit drops failures until each family has at most so many, and shortens their errors. A Service
// of which a dropped failure may be has no Change any more.
func (r *Report) Limit(failures, length int) {
	for name, f := range r.Families {
		if n := len(f.Failed); n > failures {
			f.Failed, f.Unlisted = slices.Clip(f.Failed[:failures]), f.Unlisted+n-failures
		}
		for i := range f.Failed {
			f.Failed[i].Error = shortened(f.Failed[i].Error, length)
		}
		f.Error = shortened(f.Error, length)
		r.Families[name] = f
	}
}

// shortened returns the first bytes of a text, without a part of a character.
func shortened(text string, length int) string {
	if len(text) <= length {
		return text
	}
	for length > 0 && !utf8.RuneStart(text[length]) {
		length--
	}
	return text[:length]
}

// Change is a change of a Service or of its EndpointSlices.
type Change struct {
	Service types.NamespacedName
	// Versions are the resourceVersions of the objects that changed; an empty one does not
	// matter. A deletion has one too: that of the object in the watch event.
	Versions changetracker.Versions
}

// Validate returns an error if there is no version, or one that cannot be compared.
func (c *Change) Validate() error {
	if c.Versions == (changetracker.Versions{}) {
		return errors.New("no version to wait for: set Change.Versions")
	}
	return noOrder(c.Versions)
}

// noOrder returns an error if a version has no order.
func noOrder(versions changetracker.Versions) error {
	for _, v := range []string{versions.Services, versions.EndpointSlices} {
		if _, err := resourceversion.CompareResourceVersion(cmp.Or(v, "1"), "1"); err != nil {
			return fmt.Errorf("this API server's versions cannot be compared, so nobody can tell which is newer: %w", err)
		}
	}
	return nil
}

// Missing returns nil if a node has programmed a Change in all of its IP families, and an error
// that says what is missing otherwise.
func (r *Report) Missing(c Change) error {
	if len(r.Families) == 0 {
		return errors.New("it serves no IP family")
	}
	var missing []string
	for name, f := range r.Families {
		if why := f.missing(&c); why != "" {
			missing = append(missing, string(name)+": "+why)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return errors.New(strings.Join(missing, "; "))
}

func (f *Family) missing(c *Change) string {
	if f.Error != "" {
		return f.Error
	}
	for _, v := range []struct{ kind, want, has string }{
		{"Services", c.Versions.Services, f.Services}, {"EndpointSlices", c.Versions.EndpointSlices, f.EndpointSlices},
	} {
		if v.want == "" {
			continue
		}
		switch order, err := resourceversion.CompareResourceVersion(v.has, v.want); {
		case v.has == "":
			return fmt.Sprintf("no version of %s is known: their source does not call OnVersion", v.kind)
		case err != nil:
			return fmt.Sprintf("%s have version %q: %v", v.kind, v.has, err)
		case order < 0:
			return fmt.Sprintf("%s are those of version %s, want %s", v.kind, v.has, v.want)
		}
	}
	for i := range f.Failed {
		if e := &f.Failed[i]; e.Namespace == c.Service.Namespace && e.Service == c.Service.Name {
			return fmt.Sprintf("port %q (%s) fails since %s: %s", e.Port, e.Protocol, e.Since.Format(time.RFC3339), e.Error)
		}
	}
	if f.Unlisted > 0 && c.Service.Name != "" {
		return fmt.Sprintf("%d service ports fail that the report does not list: this may be one of them", f.Unlisted)
	}
	return ""
}
