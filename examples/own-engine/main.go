// Own-engine makes nginx proxy Services: a new engine on the Engine interface, with
// trackers, rate limits, retries, health and metrics from serviceplane.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "`file` that says how to reach the API server")
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

func run(ctx context.Context, kubeconfig, conf string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	measured, err := metrics.New(prometheus.DefaultRegisterer, metrics.Options{Mode: "nginx"})
	if err != nil {
		return err
	}
	proxy, err := newProxy(conf, measured, func(ctx context.Context) error { return exec.CommandContext(ctx, "nginx", "-s", "reload").Run() })
	if err != nil {
		return err
	}
	measured.Watch(proxy.Status)
	http.Handle("/metrics", promhttp.Handler())
	http.Handle("/", healthcheck.NewHandler(proxy.Status, healthcheck.HandlerOptions{}))
	server := &http.Server{Addr: "127.0.0.1:10256"} //nolint:gosec // of loopback
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, 3)
	var running sync.WaitGroup
	for i, task := range []func() error{
		func() error { return proxy.Run(ctx) },
		func() error { return informer.Run(ctx, client, proxy, informer.Options{}) },
		server.ListenAndServe,
	} {
		running.Go(func() {
			defer stop()
			errs[i] = task()
		})
	}
	<-ctx.Done()
	errs = append(errs, server.Close())
	running.Wait()
	return errors.Join(errs...)
}

// newProxy is a Provider of one IP family, with the engine of this program.
func newProxy(conf string, observer proxier.Observer, reload func(context.Context) error) (*proxier.Proxier, error) {
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	engine := &nginx{path: conf, reload: reload}
	return proxier.New(config, proxier.Deps{Observer: observer}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
}
