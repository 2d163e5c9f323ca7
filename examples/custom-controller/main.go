// Custom-controller proxies Services without Kubernetes. It reads and watches a file in a
// format of its own.
//
//	web  10.96.0.10:80  10.0.0.7:8080 10.0.0.8:8080
//	dns  10.96.0.53:53  10.0.0.9:5353
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, flag.Arg(0), proxier.Config{}, zap.NewExample()); err != nil {
		fmt.Fprintln(os.Stderr, "custom-controller:", err)
		stop()
		os.Exit(1)
	}
}

// run proxies the Services of the file until ctx ends.
func run(ctx context.Context, file string, config proxier.Config, log *zap.Logger) error {
	config.Names, _ = proxier.NamesFor("custom")
	proxy, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{Logger: log})
	if err != nil {
		return err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer func() { _ = watcher.Close() }()
	if err := watcher.Add(filepath.Dir(file)); err != nil { // the file may be replaced
		return err
	}
	c := &controller{proxy: proxy, known: map[types.NamespacedName]bool{}}
	if err := c.read(file); err != nil {
		return err
	}
	proxy.OnServiceSynced()
	proxy.OnEndpointSlicesSynced()
	tasks, ctx := errgroup.WithContext(ctx)
	tasks.Go(func() error { return proxy.Run(ctx) })
	for {
		select {
		case <-watcher.Events:
			if err := c.read(file); err != nil { // the previous Services stay
				log.Warn("file is invalid, the previous Services stay", zap.Error(err))
			}
		case err := <-watcher.Errors:
			log.Warn("watch failed, changes of the file may be missed", zap.Error(err))
		case <-ctx.Done():
			return tasks.Wait()
		}
	}
}

// controller passes the Services of the file to the trackers.
type controller struct {
	proxy *proxier.Proxier
	known map[types.NamespacedName]bool
}

// read passes the Services of the file to the trackers. An invalid file changes nothing.
func (c *controller) read(file string) error {
	services, err := parse(file)
	if err != nil {
		return err
	}
	tracker := c.proxy.Tracker()
	now := map[types.NamespacedName]bool{}
	var errs []error
	for _, s := range services {
		now[s.port.Name.NamespacedName] = true
		_, errPort := tracker.Services.Set(s.port.Name.NamespacedName, s.port)
		_, errEndpoints := tracker.Endpoints.Set(s.port.Name, s.endpoints...)
		errs = append(errs, errPort, errEndpoints)
	}
	for name := range c.known {
		if !now[name] {
			tracker.Services.Delete(name)
		}
	}
	c.known = now
	c.proxy.Trigger()
	return errors.Join(errs...)
}

type service struct {
	port      changetracker.ServicePort
	endpoints []changetracker.Endpoint
}

// parse parses lines with a name, a VIP and endpoints.
func parse(file string) (services []service, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for i, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		var addrs []netip.AddrPort
		for _, text := range fields[1:] {
			addr, err := netip.ParseAddrPort(text)
			if err != nil {
				return nil, fmt.Errorf("%s:%d: %w", file, i+1, err)
			}
			addrs = append(addrs, addr)
		}
		if len(addrs) == 0 {
			return nil, fmt.Errorf("%s:%d: %s has no VIP", file, i+1, fields[0])
		}
		var s service
		s.port.Name.Namespace, s.port.Name.Name, s.port.Name.Protocol = "custom", fields[0], v1.ProtocolTCP
		s.port.ClusterIP, s.port.Port = addrs[0].Addr(), addrs[0].Port()
		for _, addr := range addrs[1:] {
			s.endpoints = append(s.endpoints, changetracker.Endpoint{Addr: addr, Ready: true, Serving: true})
		}
		services = append(services, s)
	}
	return services, nil
}
