// Own-engine proxies Services with nginx. It implements proxier.Engine; change tracking,
// rate limits, retries, health and metrics come from serviceplane.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"text/template"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// servers is the template of nginx's configuration. The node rejects connections to other
// ports: node ports, and frontends without endpoints.
const servers = `{{range $s := .}}{{range .Frontends}}{{if and .VIP.IsValid (eq .Action.String "forward")}}
# {{$s.Name}}
upstream {{$s.Protocol}}_{{.VIP}}_{{.Port}} {
	{{if $s.Affinity}}hash $remote_addr consistent;{{end}}
	{{range ($s.Endpoints .Scope).All}}server {{.}}; {{end}}
}
server {
	listen {{.VIP}}:{{.Port}}{{if eq $s.Protocol.String "UDP"}} udp{{end}};
	{{range .SourceRanges}}allow {{.}}; {{end}}{{if .Restricted}}deny all;{{end}}
	proxy_pass {{$s.Protocol}}_{{.VIP}}_{{.Port}};
}
{{end}}{{end}}{{end}}`

// nginx is an engine that configures nginx. VIPs must be addresses of the machine.
type nginx struct {
	path     string // of the configuration
	reload   func(context.Context) error
	services map[changetracker.ServicePortName]*desired.Service
}

// Apply implements proxier.Engine. It reports service ports that nginx cannot proxy, and
// programs the others. After an error the next update is full.
func (n *nginx) Apply(ctx context.Context, update desired.Update) (result proxier.Result, err error) {
	if update.Full {
		n.services = map[changetracker.ServicePortName]*desired.Service{}
	}
	var failed []changetracker.ServicePortName
	for s := range update.Services() {
		if s.Protocol == desired.SCTP {
			err := fmt.Errorf("%w: nginx does not proxy SCTP", proxier.ErrNotSupported)
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: err, Terminal: true})
			failed = append(failed, s.Name)
		}
	}
	for _, o := range update.Applied(failed) {
		if n.services[o.Name] = o.Is; o.Is == nil {
			delete(n.services, o.Name)
		}
	}
	return result, n.write(ctx, n.services)
}

// Cleanup, Close, Traits and Abilities implement proxier.Engine.
func (n *nginx) Cleanup(ctx context.Context) error      { return n.write(ctx, nil) }
func (n *nginx) Close() error                           { return nil }
func (n *nginx) Traits(*desired.Service) desired.Traits { return desired.Traits{SourceLost: true} }
func (n *nginx) Abilities() proxier.Abilities           { return proxier.Abilities{} }

// write writes the configuration and reloads nginx if it has changed.
func (n *nginx) write(ctx context.Context, services map[changetracker.ServicePortName]*desired.Service) error {
	sorted := slices.SortedFunc(maps.Values(services), func(a, b *desired.Service) int { return a.Name.Compare(b.Name) })
	var now bytes.Buffer
	if err := template.Must(template.New("servers").Parse(servers)).Execute(&now, sorted); err != nil {
		return err
	}
	before, _ := os.ReadFile(n.path) // it does not exist at first
	if bytes.Equal(before, now.Bytes()) {
		return nil
	}
	if err := errors.Join(os.WriteFile(n.path+".new", now.Bytes(), 0o644), os.Rename(n.path+".new", n.path)); err != nil {
		return err
	}
	if err := n.reload(ctx); err != nil {
		return errors.Join(fmt.Errorf("reload nginx: %w", err), os.WriteFile(n.path, before, 0o644))
	}
	return nil
}

// newProxy returns a proxy for IPv4 with the engine of this program.
func newProxy(config proxier.Config, conf string, observer proxier.Observer, reload func(context.Context) error) (*proxier.Proxier, error) {
	config.Families = []v1.IPFamily{v1.IPv4Protocol}
	deps := nodedeps.Complete(config, proxier.Deps{Observer: observer})
	deps.Conntrack = nil // nginx closes connections itself
	return proxier.New(config, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &nginx{path: conf, reload: reload}})
}

func run(ctx context.Context, kubeconfig, conf string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	measured, err := metrics.New(prometheus.DefaultRegisterer, metrics.Options{Mode: "nginx"})
	if err != nil {
		return err
	}
	proxy, err := newProxy(proxier.Config{}, conf, measured, func(ctx context.Context) error { return exec.CommandContext(ctx, "nginx", "-s", "reload").Run() })
	if err != nil {
		return err
	}
	measured.Watch(metrics.Sources{Status: proxy.Status})
	http.Handle("/metrics", promhttp.Handler())
	http.Handle("/", healthcheck.NewHandler(proxy.Status, healthcheck.HandlerOptions{}))
	server := healthcheck.Server{Name: "healthz", Address: "127.0.0.1:10256", Handler: http.DefaultServeMux}

	tasks, ctx := errgroup.WithContext(ctx) // if a task fails, the others end
	tasks.Go(func() error { return proxy.Run(ctx) })
	tasks.Go(func() error { return informer.Run(ctx, config, proxy, informer.Options{}) })
	tasks.Go(func() error { return server.Run(ctx) })
	return tasks.Wait()
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `file` for the API server")
	conf := flag.String("conf", "/etc/nginx/services.conf", "`file` that nginx includes in its stream block")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *kubeconfig, *conf); err != nil {
		fmt.Fprintln(os.Stderr, "own-engine:", err)
		stop()
		os.Exit(1)
	}
}
