package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// nginx is an engine that has nginx do the proxying: it writes the servers of a stream
// block, and makes nginx read them. VIPs must be addresses of the machine.
type nginx struct {
	path     string
	reload   func(context.Context) error
	services map[changetracker.ServicePortName]*desired.Service
}

var _ proxier.Engine = (*nginx)(nil)

// Apply implements proxier.Engine. What cannot be proxied is set aside, and the rest
// goes in; after any other error the next update is full.
func (n *nginx) Apply(ctx context.Context, update desired.Update) error {
	if update.Full || n.services == nil {
		n.services = map[changetracker.ServicePortName]*desired.Service{}
	}
	for _, name := range update.Removed {
		delete(n.services, name)
	}
	var errs []error
	for _, s := range update.Services {
		if s.Protocol == desired.SCTP {
			delete(n.services, s.Name)
			errs = append(errs, &proxier.ServiceError{Name: s.Name, Family: update.Family, Err: fmt.Errorf("%w: nginx knows no SCTP", proxier.ErrNotSupported)})
			continue
		}
		n.services[s.Name] = s
	}
	return errors.Join(append(errs, n.write(ctx))...)
}

// Cleanup implements proxier.Engine.
func (n *nginx) Cleanup(ctx context.Context) error {
	n.services = nil
	return n.write(ctx)
}

// write brings the file, and nginx, to what the services are. If they are so already,
// nothing happens: Apply is idempotent.
func (n *nginx) write(ctx context.Context) error {
	before, err := os.ReadFile(n.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	now := n.render()
	if bytes.Equal(before, now) {
		return nil
	}
	if err := os.WriteFile(n.path+".new", now, 0o644); err != nil {
		return err
	}
	if err := os.Rename(n.path+".new", n.path); err != nil {
		return err
	}
	if err := n.reload(ctx); err != nil {
		return errors.Join(fmt.Errorf("reload nginx: %w", err), os.WriteFile(n.path, before, 0o644))
	}
	return nil
}

// render prints the servers, in an order that depends on nothing else.
func (n *nginx) render() []byte {
	var b bytes.Buffer
	for _, name := range slices.SortedFunc(maps.Keys(n.services), changetracker.ServicePortName.Compare) {
		s := n.services[name]
		udp := map[desired.Protocol]string{desired.UDP: " udp"}[s.Protocol]
		for _, f := range s.Frontends {
			if f.Kind == desired.NodePort || f.Action != desired.Forward {
				continue // nobody listens: the node refuses
			}
			upstream := fmt.Sprintf("up_%x_%d%s", f.VIP.AsSlice(), f.Port, cmp.Or(udp, " tcp")[1:])
			fmt.Fprintf(&b, "# %v\nupstream %s {\n", name, upstream)
			if s.Affinity > 0 {
				b.WriteString("\thash $remote_addr consistent;\n")
			}
			for _, endpoint := range s.Endpoints(f.Scope) {
				fmt.Fprintf(&b, "\tserver %v;\n", endpoint)
			}
			fmt.Fprintf(&b, "}\nserver {\n\tlisten %v%s;\n\tproxy_pass %s;\n", netip.AddrPortFrom(f.VIP, f.Port), udp, upstream)
			for _, sources := range f.SourceRanges {
				fmt.Fprintf(&b, "\tallow %v;\n", sources)
			}
			if f.Restricted {
				b.WriteString("\tdeny all;\n")
			}
			b.WriteString("}\n")
		}
	}
	return b.Bytes()
}
