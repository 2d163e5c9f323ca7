// Agent runs an nftables engine in each network namespace with a link of the plugin.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/rpc"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `file` for the API server")
	node := flag.String("node", "", "`name` of this node")
	dir := flag.String("dir", "/run/serviceplane-cni", "`directory` of the links and the socket")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *node, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

// run serves the plugin until ctx ends. The rules in the pods stay.
func run(ctx context.Context, kubeconfig, node, dir string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	defer factory.Shutdown()
	a := &Agent{dir: dir, log: zap.NewExample(), pods: map[string]*pod{}, bind: func(p proxier.Provider) (unbind func(), err error) {
		defer factory.Start(ctx.Done())
		return informer.Bind(informer.Informers{
			Services:       factory.Core().V1().Services().Informer(),
			EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
			ServiceCIDRs:   factory.Networking().V1().ServiceCIDRs().Informer(),
			Nodes:          factory.Core().V1().Nodes().Informer(),
		}, p, informer.Options{NodeName: node})
	}}
	server, socket := rpc.NewServer(), filepath.Join(dir, "agent.sock")
	if err := errors.Join(server.Register(a), os.MkdirAll(dir, 0o700), os.RemoveAll(socket), a.Sync("", nil)); err != nil {
		return err
	}
	defer a.close()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() { // until ctx ends
		go server.ServeConn(conn) // ends with the plugin's process
	}
	return nil
}

// Agent is the plugin's RPC server.
type Agent struct {
	dir  string
	log  *zap.Logger
	bind func(proxier.Provider) (unbind func(), err error) // to shared informers
	mu   sync.Mutex
	pods map[string]*pod // by link
}

type pod struct {
	*proxier.Proxier
	stop func()
}

// Sync starts proxies for new links, and stops those without one. If a link is named, it
// waits until the proxy there has programmed all changes.
func (a *Agent) Sync(asked string, _ *bool) error {
	a.mu.Lock()
	links, err := filepath.Glob(filepath.Join(a.dir, "*.pod"))
	for link, p := range a.pods {
		if !slices.Contains(links, link) {
			p.stop()
			a.log.Info("pod removed", zap.String("pod", link), zap.Error(p.Cleanup(context.Background())))
			delete(a.pods, link)
		}
	}
	for _, link := range links {
		if a.pods[link] == nil {
			a.log.Info("pod added", zap.String("pod", link), zap.Error(a.start(link)))
		}
	}
	p := a.pods[asked]
	a.mu.Unlock()
	switch {
	case err != nil || asked == "":
		return err
	case p == nil:
		return fmt.Errorf("no proxy runs for %s", asked)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return p.Sync(ctx)
}

// start requires that mu is held.
func (a *Agent) start(link string) error {
	netns, err := os.Readlink(link)
	if _, gone := os.Stat(link); gone != nil || err != nil {
		return errors.Join(gone, err, os.Remove(link)) // the namespace does not exist any more
	}
	kinds := []desired.Kind{desired.ClusterIP, desired.LoadBalancer, desired.ExternalIP} // node ports belong to the node
	config := nftables.Config{Config: proxier.Config{NetNS: netns, Kinds: kinds}}
	p, err := nftables.New(config, proxier.Deps{Health: proxier.NoHealth(), Logger: a.log.With(zap.String("pod", link))})
	if err != nil {
		return err
	}
	unbind, err := a.bind(p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) }) // Sync returns the error
	a.pods[link] = &pod{Proxier: p, stop: func() { unbind(); cancel(); running.Wait() }}
	return nil
}

// close stops the proxies. The rules stay.
func (a *Agent) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.pods {
		p.stop()
	}
}
