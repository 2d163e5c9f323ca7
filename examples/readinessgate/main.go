// Readinessgate is a controller: a pod counts as ready when every node can reach it.
//
//	spec:
//	  readinessGates: [{conditionType: serviceplane.io/programmed}]
//
// It publishes the pod in an EndpointSlice of its own, waits until all nodes have programmed that,
// and then sets the condition of the pod.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	log, err := zap.NewProduction()
	if err == nil {
		err = run(ctx, os.Args[1:], log)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "readinessgate:", err)
		os.Exit(1)
	}
}

// run does what the arguments say, until ctx ends.
func run(ctx context.Context, args []string, log *zap.Logger) error {
	const port, reportAfter, interval, qps = 10256, 30 * time.Second, 500 * time.Millisecond, 50
	f := pflag.NewFlagSet("readinessgate", pflag.ContinueOnError)
	kubeconfig := f.String("kubeconfig", "", "kubeconfig file for the API server; without it, the pod's service account is used")
	gate := f.String("condition", "serviceplane.io/programmed", "type of the condition, as in readinessGates of the pods")
	nodePort := f.Uint16("port", port, "port of the nodes where the proxy answers /programmed")
	nodeSelector := f.String("node-selector", "", "labels of the nodes that run the proxy; default is all nodes")
	notReadyFor := f.Duration("ignore-not-ready-for", 0, "do not wait for nodes that are not Ready for this long; 0 waits for them too")
	c := &controller{log: log}
	f.DurationVar(&c.reportAfter, "report-after", reportAfter, "report the nodes that are behind when a pod waits for this long, and each time again")
	switch err := f.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		return nil
	case err != nil:
		return err
	case c.reportAfter <= 0:
		return fmt.Errorf("--report-after=%v: want more than 0", c.reportAfter)
	}
	c.gate = v1.PodConditionType(*gate)
	selector, err := labels.Parse(*nodeSelector)
	if err != nil {
		return fmt.Errorf("--node-selector=%s: %w", *nodeSelector, err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return fmt.Errorf("load API server configuration: %w", err)
	}
	config.QPS, config.Burst = qps, 2*qps
	client, err := cluster.New(config)
	if err != nil {
		return err
	}
	c.all = client.Dial(cluster.NodeOptions{Port: *nodePort, Policy: programmed.NodePolicy{Selector: selector, NotReadyFor: *notReadyFor}})
	c.all.Interval = interval
	if err := c.connect(config); err != nil {
		return fmt.Errorf("create client: %w", err)
	}
	if err := c.run(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}
