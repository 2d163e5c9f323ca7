package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/proxier"
)

// show builds the cluster, runs the proxy in it, and prints what connections
// experience at first, after scaling a Service, and after losing an endpoint. The
// end of ctx is the end of the show, and no error.
func show(ctx context.Context, out io.Writer, all objects, m mode) (err error) {
	world := &cluster{}
	defer func() { err = errors.Join(err, world.close()) }()
	if err := world.build(ctx, all); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, netns.ErrPrivilege) {
			return fmt.Errorf("%w: %w", errCannotShow, err)
		}
		return fmt.Errorf("build cluster: %w", err)
	}
	syncs := &journal{}
	config := all.config()
	config.NetNS = world.node.Path()
	p, err := m.provider(config, proxier.Deps{Observer: syncs})
	if err != nil {
		return err
	}
	all.feed(p)
	err = running(ctx, p, func(ctx context.Context) error {
		return (&act{world: world, proxy: p, syncs: syncs, out: out}).play(ctx, all)
	})
	if m == modeIPVS && errors.Is(err, proxier.ErrNotSupported) {
		err = fmt.Errorf("%w; a virtual machine has it: hack/vm/exec.sh 6.12 ./examples/quickstart -mode ipvs", err)
	}
	if ctx.Err() != nil {
		err = nil // an interrupted show has ended as it was asked to
	}
	return errors.Join(err, p.Cleanup(context.WithoutCancel(ctx)))
}

// act is the show in progress.
type act struct {
	world *cluster
	proxy provider
	syncs *journal
	out   io.Writer
}

func (a *act) play(ctx context.Context, all objects) error {
	title := fmt.Sprintf("%d Services, %d pods, one node; each line is %d connections", len(all.services), len(a.world.pods), connections)
	if err := a.present(ctx, title, all); err != nil {
		return err
	}
	star, found := all.scalable()
	if !found {
		return nil
	}
	star, added, err := a.grow(ctx, star)
	if err != nil {
		return err
	}
	if err := a.present(ctx, fmt.Sprintf("%s scaled up by %s", star.name(), added), star); err != nil {
		return err
	}
	star, gone, err := a.shrink(star)
	if err != nil {
		return err
	}
	return a.present(ctx, fmt.Sprintf("%s without %s, which is dead", star.name(), gone), star)
}

// grow starts another pod of a Service and tells the proxy.
func (a *act) grow(ctx context.Context, star objects) (bigger objects, name string, err error) {
	bigger.services = star.services
	for _, slice := range star.slices {
		grown, added := grow(slice)
		if err := a.world.addPod(ctx, added, podPorts(slice)); err != nil {
			return bigger, "", err
		}
		a.proxy.OnEndpointSliceUpdate(slice, grown)
		bigger.slices, name = append(bigger.slices, grown), added.name
	}
	return bigger, name, nil
}

// shrink kills a pod of a Service and tells the proxy.
func (a *act) shrink(star objects) (smaller objects, name string, err error) {
	smaller.services = star.services
	for _, slice := range star.slices {
		shrunk, gone := shrink(slice)
		if err := a.world.kill(gone); err != nil {
			return smaller, "", err
		}
		a.proxy.OnEndpointSliceUpdate(slice, shrunk)
		smaller.slices, name = append(smaller.slices, shrunk), gone.name
	}
	return smaller, name, nil
}

// present waits until everything is programmed and prints one table.
func (a *act) present(ctx context.Context, title string, all objects) error {
	if err := a.proxy.Sync(ctx); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	if _, err := fmt.Fprintf(a.out, "%s\n%s\n", title, a.syncs.take()); err != nil {
		return err
	}
	rows := a.world.probe(ctx, all)
	if err := ctx.Err(); err != nil {
		return err
	}
	return write(a.out, rows)
}
