package spctl

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// title is the port as kubectl shows it, with the port's name.
func title(p *answers.ServicePort) string {
	return strings.TrimSpace(fmt.Sprintf("%s %d/%s", p.PortName, p.Port, p.Protocol))
}

func endpoints(p *answers.ServicePort) string {
	return fmt.Sprintf("%d/%d", p.EndpointsUsable, p.EndpointsAll)
}

func external(p *answers.ServicePort) string {
	return list(slices.Concat(p.LoadBalancerVIPs, p.ExternalIPs))
}

func policy(p *answers.ServicePort) string {
	if p.ExternalPolicy == "" || p.ExternalPolicy == p.InternalPolicy {
		return p.InternalPolicy
	}
	return p.InternalPolicy + ", external " + p.ExternalPolicy
}

func (a *app) services() *cobra.Command {
	var limit int
	c := &cobra.Command{
		Use:     "services [TEXT]",
		Aliases: []string{"service", "svc"},
		Short:   "List Services, or those whose name, VIP, node port or endpoint address contains a text",
		Args:    cobra.MaximumNArgs(1),
		Example: "services\nservices web\nservices 10.96.0.10\nservices -o json > before.json",
	}
	c.Flags().IntVar(&limit, "limit", 0, "how many Services to list; 0 for all")
	wanted := selected(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if a.options.Nodes != nil {
			query := wanted(args)
			if query.Has("filter") {
				return errors.New("a filter lists the Services of one node: name it with --node")
			}
			text := query.Get("q")
			return a.perNode(c, "state", url.Values{"namespace": query["namespace"]}, func(w *printer, r []response) error { return w.sideBySide(r, text, limit) }, nil)
		}
		p, err := a.one(c.Context())
		if err != nil {
			return err
		}
		content, err := a.listed(c.Context(), p, wanted(args), limit)
		if err != nil {
			return err
		}
		return a.print(c, content, func(w *printer) error { return w.services(content) })
	}
	return c
}

// selected adds the flags that select Services. query returns the parameters of services.
func selected(c *cobra.Command) (query func(args []string) url.Values) {
	var namespace string
	var filters []string
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "only Services of this namespace")
	c.Flags().StringSliceVar(&filters, "filter", nil, "only Services that have all of these on some port: "+strings.Join(knownFilters(), ", "))
	must(c.RegisterFlagCompletionFunc("filter", cobra.FixedCompletions(knownFilters(), cobra.ShellCompDirectiveNoFileComp)))
	short := map[string]*bool{
		"no-endpoints": c.Flags().Bool("no-endpoints", false, "only Services that reject connections for want of endpoints"),
		"dropping":     c.Flags().Bool("dropping", false, "only Services that drop what comes from outside"),
		"failed":       c.Flags().Bool("failed", false, "only Services that the last sync could not program"),
	}
	return func(args []string) url.Values {
		query := url.Values{}
		if len(args) > 0 {
			query.Set("q", args[0])
		}
		if namespace != "" {
			query.Set("namespace", namespace)
		}
		all := slices.Clone(filters)
		for name, set := range short {
			if *set {
				all = append(all, name)
			}
		}
		if len(all) > 0 {
			slices.Sort(all)
			query.Set("filter", list(all))
		}
		return query
	}
}

// knownFilters are debughttp's, for the help. The proxy refuses others.
func knownFilters() []string {
	return []string{"failed", "no-endpoints", "dropping", "lost", "ejected", "external", "affinity", "balancing"}
}

// pageSize is the largest limit of debughttp.
const pageSize = 1000

// listed returns the answer of services from all pages, or the first limit Services.
func (a *app) listed(ctx context.Context, p *proxy, query url.Values, limit int) (json.RawMessage, error) {
	type page struct {
		Total    int               `json:"total"`
		Offset   int               `json:"offset"`
		Services []json.RawMessage `json:"services"`
	}
	all := page{Services: []json.RawMessage{}}
	for limit <= 0 || len(all.Services) < limit {
		query.Set("offset", strconv.Itoa(len(all.Services)))
		query.Set("limit", strconv.Itoa(pageSize))
		if limit > 0 {
			query.Set("limit", strconv.Itoa(min(pageSize, limit-len(all.Services))))
		}
		content, err := a.fetch(ctx, p, "services", query)
		if err != nil {
			return nil, err
		}
		next, err := decode[page](content)
		if err != nil {
			return nil, err
		}
		all.Total, all.Services = next.Total, append(all.Services, next.Services...)
		if len(next.Services) == 0 || len(all.Services) >= next.Total {
			break
		}
	}
	return json.Marshal(all)
}

// fetch sends one GET with the time limit of requests.
func (a *app) fetch(ctx context.Context, p *proxy, path string, query url.Values) (json.RawMessage, error) {
	ctx, stop := a.limited(ctx, 0)
	defer stop()
	return p.get(ctx, path, query)
}

// named is a service port with the Service that it belongs to.
type named struct {
	*answers.ServiceState
	*answers.ServicePortState
}

func (w *printer) services(content json.RawMessage) error {
	answer, err := decode[answers.Services](content)
	if err != nil {
		return err
	}
	if len(answer.Services) == 0 {
		w.line("no Services")
	}
	var table [][]string
	for i := range answer.Services {
		s := &answer.Services[i]
		for j := range s.ServicePorts {
			p := &s.ServicePorts[j]
			table = append(table, []string{s.Namespace, s.Name, title(p), p.Family, p.ClusterIP, external(p), count(int(p.NodePort)), endpoints(p), policy(p), s.Verdict})
		}
	}
	rows(w, "NAMESPACE NAME PORT FAMILY CLUSTER-IP EXTERNAL-IP NODE-PORT ENDPOINTS POLICY VERDICT", table, func(cells []string) []string { return cells })
	if n := answer.Total - len(answer.Services); n > 0 {
		w.line(fmt.Sprintf("and %d more", n))
	}
	return nil
}

// ports returns all service ports of Services.
func ports(services []answers.ServiceState) (all []named) {
	for i := range services {
		for j := range services[i].ServicePorts {
			all = append(all, named{&services[i], &services[i].ServicePorts[j]})
		}
	}
	return all
}

// sideBySide prints the Services of several nodes. Where they differ, it shows the first one's.
func (w *printer) sideBySide(responses []response, text string, limit int) error {
	var sides []side
	first := map[field]named{}
	nodes := map[field]int{}
	for i := range responses {
		state, err := decode[answers.State](responses[i].Answer)
		if err != nil {
			return fmt.Errorf("%s: %w", responses[i].Node, err)
		}
		sides = append(sides, side{responses[i].Node, fieldsOf(&state)})
		for _, p := range ports(state.Services) {
			key := p.key()
			if nodes[key]++; nodes[key] == 1 {
				first[key] = p
			}
		}
	}
	differing := map[field]int{}
	for _, d := range differences(sides) {
		differing[field{d.Namespace, d.Name, d.Port, d.Family, ""}]++
	}
	keys := slices.SortedFunc(maps.Keys(first), field.compare)
	keys = slices.DeleteFunc(keys, func(k field) bool { return !strings.Contains(k.namespace+"/"+k.name, text) })
	if limit > 0 {
		keys = keys[:min(limit, len(keys))]
	}
	rows(w, "NAMESPACE NAME PORT FAMILY CLUSTER-IP ENDPOINTS NODES DIFFERENCES", keys, func(k field) []string {
		p := first[k]
		return []string{
			p.Namespace, p.Name, title(&p.ServicePort), p.Family, p.ClusterIP, endpoints(&p.ServicePort),
			fmt.Sprintf("%d/%d", nodes[k], len(responses)), count(differing[k]),
		}
	})
	return nil
}

func (a *app) get() *cobra.Command {
	return a.ofService("get", "Show one Service with its frontends and endpoints", "service", (*printer).service)
}

// ofService returns a subcommand that asks for something of one Service.
func (a *app) ofService(name, short, path string, table func(*printer, json.RawMessage) error) *cobra.Command {
	return &cobra.Command{
		Use:               name + " NAMESPACE/NAME",
		Short:             short,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeServices,
		RunE: func(c *cobra.Command, args []string) error {
			query, err := serviceQuery(args[0])
			if err != nil {
				return err
			}
			return a.show(c, path, query, table)
		},
	}
}

// show asks for one answer and prints it.
func (a *app) show(c *cobra.Command, path string, query url.Values, table func(*printer, json.RawMessage) error) error {
	p, err := a.one(c.Context())
	if err != nil {
		return err
	}
	content, err := a.fetch(c.Context(), p, path, query)
	if err != nil {
		return err
	}
	return a.print(c, content, func(w *printer) error { return table(w, content) })
}

// serviceQuery parses NAMESPACE/NAME; without a namespace it is default, as with kubectl.
func serviceQuery(text string) (url.Values, error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		namespace, name = "default", text
	}
	if name == "" || strings.Contains(name, "/") {
		return nil, fmt.Errorf("%s: want NAMESPACE/NAME, or the name of a Service in namespace default", text)
	}
	return url.Values{"namespace": {namespace}, "name": {name}}, nil
}

func (w *printer) service(content json.RawMessage) error {
	s, err := decode[answers.Service](content)
	if err != nil {
		return err
	}
	w.fields("Service", s.Namespace+"/"+s.Name)
	for i := range s.ServicePorts {
		w.port(&s.ServicePorts[i])
	}
	if len(s.UnmatchedSlices) > 0 {
		w.section("EndpointSlices that fit no port of the Service, by name and protocol:")
	}
	rows(w, "NAME FAMILY PORTS ENDPOINTS", s.UnmatchedSlices, func(u answers.UnmatchedSlice) []string {
		return []string{u.Name, u.Family, list(u.Ports), fmt.Sprint(u.Endpoints)}
	})
	return nil
}

func (w *printer) port(p *answers.ServicePortInFull) {
	w.section("%s, %s", title(&p.ServicePort), p.Family)
	affinity := ""
	if p.AffinitySeconds > 0 {
		affinity = fmt.Sprintf("ClientIP, %gs", p.AffinitySeconds)
	}
	w.fields("Policy", policy(&p.ServicePort), "Affinity", affinity, "Balancing", p.Balancing,
		"Health check port", count(int(p.HealthCheckPort)), "Error", p.Error)
	rows(w, "FRONTEND KIND ACTION SCOPE MASQUERADE SOURCES", p.Frontends, func(f answers.Frontend) []string {
		return []string{f.Text, f.Kind, f.Action, f.Scope, f.Masquerade, sources(&f)}
	})
	rows(w, "ENDPOINT STATE NODE ZONE USED", p.Endpoints, func(e answers.UsedEndpoint) []string {
		return []string{e.Address, e.State, place(&e.Endpoint), e.Zone, use(&e)}
	})
}

func sources(f *answers.Frontend) string {
	if f.Restricted && len(f.SourceRanges) == 0 {
		return "none"
	}
	return cmp.Or(list(f.SourceRanges), "all")
}

// place is the node, and whether it is the proxy's.
func place(e *answers.Endpoint) string {
	if e.Local {
		return strings.TrimSpace(e.Node + " (local)")
	}
	return e.Node
}

func use(e *answers.UsedEndpoint) string {
	if e.Used {
		return yesNo(true)
	}
	return "no: " + cmp.Or(e.Excluded, "unknown")
}

// completeServices completes the names of programmed Services.
func (a *app) completeServices(c *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	const most = 100
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	p, err := a.one(c.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	content, err := a.listed(c.Context(), p, url.Values{"q": {typed}}, most)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	answer, err := decode[answers.Services](content)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []cobra.Completion
	for _, s := range answer.Services {
		if name := s.Namespace + "/" + s.Name; strings.HasPrefix(name, typed) {
			names = append(names, name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
