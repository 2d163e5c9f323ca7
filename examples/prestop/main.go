// Prestop is for preStop hooks: it returns when no node sends new connections to the pod any more.
//
//	lifecycle:
//	  preStop:
//	    exec: {command: [/prestop/prestop, --deadline=25s]}
//
// It needs POD_NAME, POD_NAMESPACE and POD_IPS, from the downward API. The exit status is 0 if no
// node sends to the pod, 1 if the deadline came first, and 2 if it cannot tell. Standard error has
// the nodes that are behind, and why.
//
//	prestop copy FILE
//
// copies the program, for an init container that has no other: the image is empty.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
)

// The exit statuses.
const (
	statusBehind = 1 + iota
	statusFailed
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(logr.NewContext(ctx, logr.Discard()), os.Args[1:], os.Getenv)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "prestop:", err)
		os.Exit(status(err))
	}
}

// status returns the exit status of an error.
func status(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(*programmed.BehindError)), errors.As(err, new(*cluster.NotLeftError)):
		return statusBehind
	default:
		return statusFailed
	}
}

// options are the flags.
type options struct {
	kubeconfig   string
	deadline     time.Duration
	port         uint16
	nodeSelector string
	notReadyFor  time.Duration
	leases       string
}

func (o *options) register(f *pflag.FlagSet) {
	const deadline, port = 25 * time.Second, 10256
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file for the API server; without it, the pod's service account is used")
	f.DurationVar(&o.deadline, "deadline", deadline, "how long to wait at most; terminationGracePeriodSeconds must be longer")
	f.Uint16Var(&o.port, "port", port, "port of the nodes where the proxy answers /programmed")
	f.StringVar(&o.leases, "lease-namespace", "", "namespace of the nodes' Leases, for clusters where pods cannot connect to nodes; empty to ask the nodes")
	f.StringVar(&o.nodeSelector, "node-selector", "", "labels of the nodes that run the proxy; default is all nodes")
	f.DurationVar(&o.notReadyFor, "ignore-not-ready-for", 0, "do not wait for nodes that are not Ready for this long; 0 waits for them too, because they may still send connections")
}

// run does what the arguments say. env is the environment.
func run(ctx context.Context, args []string, env func(string) string) error {
	if len(args) > 0 && args[0] == "copy" {
		return copyProgram(args[1:])
	}
	var o options
	f := pflag.NewFlagSet("prestop", pflag.ContinueOnError)
	o.register(f)
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	pod := cluster.Pod{Name: env("POD_NAME"), Namespace: env("POD_NAMESPACE"), IPs: strings.Split(env("POD_IPS"), ",")}
	if pod.Name == "" || pod.Namespace == "" || pod.IPs[0] == "" {
		return errors.New("POD_NAME, POD_NAMESPACE or POD_IPS is not set: take them from the downward API, as the manifest does")
	}
	selector, err := labels.Parse(o.nodeSelector)
	if err != nil {
		return fmt.Errorf("--node-selector=%s: %w", o.nodeSelector, err)
	}
	config, err := o.restConfig()
	if err != nil {
		return fmt.Errorf("load API server configuration: %w", err)
	}
	client, err := cluster.New(config)
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, o.deadline)
	defer stop()
	policy := programmed.NodePolicy{Selector: selector, NotReadyFor: o.notReadyFor}
	waiting := client.Dial(cluster.NodeOptions{Port: o.port, Policy: policy})
	if o.leases != "" {
		var end func()
		if waiting, end, err = client.Leased(ctx, cluster.LeaseOptions{Policy: policy, Namespace: o.leases}); err != nil {
			return err
		}
		defer func() { stop(); end() }()
	}
	return client.WaitUntilLeft(ctx, pod, waiting)
}

func (o *options) restConfig() (*rest.Config, error) {
	if o.kubeconfig == "" {
		return rest.InClusterConfig()
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: o.kubeconfig}
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
}

// copyProgram copies the running program to a file.
func copyProgram(args []string) (err error) {
	if len(args) != 1 {
		return errors.New("copy: want the name of one file")
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	from, err := os.Open(self)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	const executable = 0o755
	to, err := os.OpenFile(args[0], os.O_CREATE|os.O_WRONLY|os.O_TRUNC, executable)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}
