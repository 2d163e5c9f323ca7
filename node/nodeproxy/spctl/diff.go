package spctl

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// absent is the value of a field on a side that does not have it.
const absent = "absent"

// field is one field of a service port.
type field struct{ namespace, name, port, family, field string }

func (f field) compare(g field) int {
	return cmp.Or(cmp.Compare(f.namespace, g.namespace), cmp.Compare(f.name, g.name), cmp.Compare(f.port, g.port),
		cmp.Compare(f.family, g.family), cmp.Compare(f.field, g.field))
}

// key is the field that says whether the service port exists.
func (p *named) key() field {
	return field{p.Namespace, p.Name, port(p.PortName, p.Protocol), p.Family, ""}
}

// ownNamespace is canary.Namespace: its Services have another endpoint on each node.
const ownNamespace = "serviceplane.internal"

// fieldsOf returns the values of a State that do not depend on the node.
func fieldsOf(s *answers.State) map[field]string {
	all := map[field]string{}
	for _, p := range ports(s.Services) {
		if p.Namespace == ownNamespace {
			continue
		}
		at := p.key()
		all[at] = "present"
		set := func(name, value string) {
			if at.field = name; value != "" {
				all[at] = value
			}
		}
		set("port", fmt.Sprint(p.Port))
		set("cluster IP", p.ClusterIP)
		set("external IPs", list(p.ExternalIPs))
		set("load balancer IPs", list(p.LoadBalancerVIPs))
		set("node port", count(int(p.NodePort)))
		set("health check node port", count(int(p.HealthCheckPort)))
		set("internal traffic policy", p.InternalPolicy)
		set("external traffic policy", p.ExternalPolicy)
		set("exposed on nodes with", p.ExposeOn)
		set("session affinity", count(int(p.AffinitySeconds)))
		set("load balancing", p.Balancing)
		for i := range p.Endpoints {
			e := &p.Endpoints[i]
			set("endpoint "+e.Address, e.State+beside("group", int(e.Priority))+beside("weight", int(e.Weight)))
		}
	}
	return all
}

// beside is a number that is not 0, with its name.
func beside(name string, n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" %s %d", name, n)
}

// side is one of the States that are compared.
type side struct {
	name   string
	fields map[field]string
}

// difference is a field that does not have the same value on all sides.
type difference struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      string `json:"port"`
	Family    string `json:"family"`
	// Field is empty for a service port that some sides do not have.
	Field  string  `json:"field,omitempty"`
	Values []value `json:"values"`
}

// value is a value with the sides that have it.
type value struct {
	Value string   `json:"value"`
	In    []string `json:"in"`
}

// differences compares sides. If a service port is absent on one, its fields are not
// compared.
func differences(sides []side) []difference {
	var all []field
	for i := range sides {
		for f := range sides[i].fields {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, field.compare)
	found := []difference{}
	for _, f := range slices.Compact(all) {
		with := sides
		if whole := f; f.field != "" {
			whole.field = ""
			with = slices.DeleteFunc(slices.Clone(sides), func(s side) bool { return s.fields[whole] == "" })
		}
		if values := valuesOf(f, with); len(values) > 1 {
			found = append(found, difference{f.namespace, f.name, f.port, f.family, f.field, values})
		}
	}
	return found
}

// valuesOf returns the different values of a field, that of most sides first.
func valuesOf(f field, sides []side) (values []value) {
	for i := range sides {
		text := cmp.Or(sides[i].fields[f], absent)
		at := slices.IndexFunc(values, func(v value) bool { return v.Value == text })
		if at < 0 {
			at = len(values)
			values = append(values, value{Value: text})
		}
		values[at].In = append(values[at].In, sides[i].name)
	}
	slices.SortStableFunc(values, func(a, b value) int { return cmp.Compare(len(b.In), len(a.In)) })
	return values
}

func (a *app) state() *cobra.Command {
	return plain("state", "Print everything that is programmed, for diff",
		"Print all Services with their endpoints, as JSON, or as YAML with --output=yaml. Command diff compares a file of this output with a proxy.", func(c *cobra.Command) error {
			if a.output == asTable {
				a.output = asJSON
			}
			return a.show(c, "state", url.Values{}, nil)
		})
}

func (a *app) diff() *cobra.Command {
	var with []string
	c := &cobra.Command{
		Use:   "diff [FILE…]",
		Short: "Compare what is programmed with a file of command state, or with other proxies",
		Long: "Compare the Services and endpoints that are programmed with files of command state, or with other proxies. " +
			"The exit status is 1 if there are differences.",
		Example: "state > before.json\ndiff before.json\ndiff --with http://192.0.2.2:10290",
	}
	c.Flags().StringArrayVar(&with, "with", nil, "address of another proxy; may be repeated")
	c.RunE = func(c *cobra.Command, files []string) error {
		nodes, err := a.sides(c.Context())
		if err != nil {
			return err
		}
		for _, address := range with {
			nodes = append(nodes, NodeProxy{Name: address, Address: address})
		}
		if len(nodes)+len(files) < 2 {
			return errors.New("nothing to compare with: want a file of command state, or --with ADDRESS")
		}
		responses := a.ask(c.Context(), nodes, "state", nil)
		for _, name := range files {
			content, err := readState(name)
			if err != nil {
				return err
			}
			responses = append(responses, response{Node: name, Answer: content})
		}
		return a.compared(c, responses)
	}
	return c
}

// readState returns the content of a file as JSON.
func readState(name string) (json.RawMessage, error) {
	content, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read file: %w", err)
	}
	var document any
	if err := yaml.Unmarshal(content, &document); err != nil { // JSON is YAML
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return json.Marshal(document)
}

// compared prints the differences of answers.
func (a *app) compared(c *cobra.Command, responses []response) error {
	var sides []side
	for i := range responses {
		if responses[i].err != nil {
			continue
		}
		state, err := decode[answers.State](responses[i].Answer)
		if err != nil {
			return fmt.Errorf("%s: %w", responses[i].Node, err)
		}
		if state.Node == "" {
			return fmt.Errorf("%s: want the output of command state", responses[i].Node)
		}
		sides = append(sides, side{responses[i].Node, fieldsOf(&state)})
	}
	found := differences(sides)
	content, err := json.Marshal(struct {
		Differences []difference `json:"differences"`
	}{found})
	if err != nil {
		return fmt.Errorf("print differences: %w", err)
	}
	err = a.print(c, content, func(w *printer) error {
		w.differences(len(sides), found)
		w.unreachable(responses)
		return nil
	})
	if err := errors.Join(err, unanswered(responses)); err != nil || len(found) == 0 {
		return err
	}
	return ErrDifferent
}

func (w *printer) differences(sides int, all []difference) {
	if len(all) == 0 {
		w.line(fmt.Sprintf("no differences between %d proxies or files", sides))
	}
	type cell struct {
		*difference
		*value
	}
	var cells []cell
	for i := range all {
		for j := range all[i].Values {
			cells = append(cells, cell{&all[i], &all[i].Values[j]})
		}
	}
	rows(w, "NAMESPACE NAME PORT FAMILY FIELD VALUE IN", cells, func(c cell) []string {
		return []string{c.Namespace, c.Name, c.Port, c.Family, cmp.Or(c.Field, "service port"), c.Value, summed(c.In)}
	})
}
