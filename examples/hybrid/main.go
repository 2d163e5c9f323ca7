// Hybrid is a Service proxy with two engines: nftables for most Services, and userspace
// for those with the annotation serviceplane.example/engine=userspace. These may have no
// endpoints: a new connection scales the Deployment of the same name to one replica, and
// waits for it.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `file` for the API server")
	node := flag.String("node", "", "`name` of this node")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *node); err != nil {
		fmt.Fprintln(os.Stderr, "hybrid:", err)
		stop()
		os.Exit(1)
	}
}

// run runs the proxy until ctx ends.
func run(ctx context.Context, kubeconfig, node string) error {
	log, err := zap.NewDevelopment()
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("read kubeconfig: %w", err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("create client: %w", err)
	}
	proxy, err := newProxy(proxier.Config{Node: changetracker.Node{Name: node}}, wake(client, log), log)
	if err != nil {
		return err
	}
	tasks, ctx := errgroup.WithContext(ctx) // if a task fails, the others end
	tasks.Go(func() error { return proxy.Run(ctx) })
	tasks.Go(func() error { return informer.Run(ctx, config, proxy, informer.Options{NodeName: node, Logger: log}) })
	return tasks.Wait()
}

// wake scales a Deployment from zero to one. It does not block: the proxy calls it while
// it handles a connection.
func wake(client kubernetes.Interface, log *zap.Logger) func(context.Context, changetracker.ServicePortName) {
	patch := []byte(`{"spec":{"replicas":1}}`)
	return func(ctx context.Context, name changetracker.ServicePortName) {
		go func() {
			_, err := client.AppsV1().Deployments(name.Namespace).Patch(ctx, name.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "scale")
			log.Info("scaled up", zap.Stringer("service", name), zap.Error(err))
		}()
	}
}
