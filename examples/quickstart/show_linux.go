package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/serviceplane/serviceplane/proxier"
)

// show builds the cluster, runs the proxy in it, and prints the results of connections: at
// first, after a Service is scaled up, and after an endpoint is lost. The end of ctx ends it
// without an error.
func show(ctx context.Context, out io.Writer, all objects, m mode) (err error) {
	cluster := &cluster{}
	defer func() { err = errors.Join(err, cluster.close()) }()
	if err := cluster.build(ctx, all); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: %w", errCannotShow, err)
		}
		return fmt.Errorf("build cluster: %w", err)
	}
	syncs := &journal{}
	config := all.config()
	config.NetNS = cluster.node.path()
	deps := proxier.Deps{Observer: syncs}
	create, counts := func() (*proxier.Proxier, error) { return m.provider(config, deps) }, func() error { return nil }
	if m == modeEBPF {
		s, err := newSockets()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.close()) }()
		create, counts = func() (*proxier.Proxier, error) { return s.provider(cluster, config, deps) }, func() error { return s.write(out) }
	}
	p, err := create()
	if err != nil {
		return err
	}
	all.feed(p)
	err = running(ctx, p, func(ctx context.Context) error {
		if err := (&demo{cluster: cluster, proxy: p, syncs: syncs, out: out}).run(ctx, all); err != nil {
			return err
		}
		return counts()
	})
	if m == modeIPVS && errors.Is(err, proxier.ErrNotSupported) {
		err = fmt.Errorf("%w; use a virtual machine: hack/vm/exec.sh 6.12 ./examples/quickstart -mode ipvs", err)
	}
	if ctx.Err() != nil {
		err = nil // interrupted by the user
	}
	return errors.Join(err, p.Cleanup(context.WithoutCancel(ctx)))
}

// demo is a demonstration in progress.
type demo struct {
	cluster *cluster
	proxy   provider
	syncs   *journal
	out     io.Writer
}

func (d *demo) run(ctx context.Context, all objects) error {
	title := fmt.Sprintf("%d Services, %d pods, one node; each line is %d connections", len(all.Services), len(d.cluster.pods), connections)
	if err := d.present(ctx, title, all); err != nil {
		return err
	}
	scaled, found := all.scalable()
	if !found {
		return nil
	}
	scaled, added, err := d.grow(ctx, scaled)
	if err != nil {
		return err
	}
	if err := d.present(ctx, fmt.Sprintf("%s scaled up by %s", scaled.name(), added), scaled); err != nil {
		return err
	}
	scaled, gone, err := d.shrink(scaled)
	if err != nil {
		return err
	}
	return d.present(ctx, fmt.Sprintf("%s without %s, which has stopped", scaled.name(), gone), scaled)
}

// grow starts another pod of a Service, and updates the proxy.
func (d *demo) grow(ctx context.Context, scaled objects) (bigger objects, name string, err error) {
	bigger.Services = scaled.Services
	for _, slice := range scaled.Slices {
		grown, added := grow(slice)
		if err := d.cluster.addPod(ctx, added, podPorts(slice)); err != nil {
			return bigger, "", err
		}
		d.proxy.OnEndpointSliceUpdate(slice, grown)
		bigger.Slices, name = append(bigger.Slices, grown), added.name
	}
	return bigger, name, nil
}

// shrink stops a pod of a Service, and updates the proxy.
func (d *demo) shrink(scaled objects) (smaller objects, name string, err error) {
	smaller.Services = scaled.Services
	for _, slice := range scaled.Slices {
		shrunk, gone := shrink(slice)
		if err := d.cluster.kill(gone); err != nil {
			return smaller, "", err
		}
		d.proxy.OnEndpointSliceUpdate(slice, shrunk)
		smaller.Slices, name = append(smaller.Slices, shrunk), gone.name
	}
	return smaller, name, nil
}

// present waits until everything is programmed and prints one table.
func (d *demo) present(ctx context.Context, title string, all objects) error {
	if err := d.proxy.Sync(ctx); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	if _, err := fmt.Fprintf(d.out, "%s\n%s\n", title, d.syncs.take()); err != nil {
		return err
	}
	rows := d.cluster.probe(ctx, all)
	if err := ctx.Err(); err != nil {
		return err
	}
	return write(d.out, rows)
}
