// Dryrun prints what an engine would program for a directory of manifests, or the
// difference between two directories. It needs no privilege and changes nothing.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/pmezard/go-difflib/difflib"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/examples/manifests"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

func main() {
	engine := flag.String("engine", "nftables", "nftables, iptables, ipvs, ebpf or userspace")
	node := flag.String("node", "", "`name` of the node, for local endpoints")
	flag.Parse()
	if err := run(os.Stdout, *engine, *node, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "dryrun:", err)
		os.Exit(1)
	}
}

// run prints the plan of one directory, or the difference between those of two.
func run(out io.Writer, engine, node string, directories []string) error {
	var plans []string
	for _, directory := range directories {
		plan, err := planDirectory(engine, node, directory)
		if err != nil {
			return fmt.Errorf("%s: %w", directory, err)
		}
		plans = append(plans, plan)
	}
	switch len(plans) {
	case 1:
		_, err := io.WriteString(out, plans[0])
		return err
	case 2:
		return difflib.WriteUnifiedDiff(out, difflib.UnifiedDiff{
			A: difflib.SplitLines(plans[0]), B: difflib.SplitLines(plans[1]),
			FromFile: directories[0], ToFile: directories[1], Context: 1,
		})
	default:
		return errors.New("want one directory, or two to compare")
	}
}

// planDirectory returns the engine's plan for both IP families.
func planDirectory(engine, node, directory string) (string, error) {
	families := []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	tracker, err := changetracker.New(changetracker.Options{Families: families, Node: changetracker.Node{Name: node}})
	if err != nil {
		return "", err
	}
	objects, err := manifests.Read(os.DirFS(directory))
	if err != nil {
		return "", err
	}
	for _, service := range objects.Services {
		tracker.Services.Update(nil, service)
	}
	for _, slice := range objects.Slices {
		tracker.Endpoints.EndpointSliceUpdate(slice, false)
	}
	var text strings.Builder
	for _, family := range families {
		engine, err := newEngine(engine, family)
		if err != nil {
			return "", err
		}
		err = tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			plan, err := engine.Abilities().Plan(everything(family, delta.After))
			fmt.Fprintf(&text, "# %s\n%s\n", family, plan)
			return nil, err
		})
		if err != nil {
			return "", err
		}
	}
	return text.String(), nil
}

// everything returns the update of a full sync, by name: the trackers have no order.
func everything(family v1.IPFamily, state *changetracker.State) desired.Update {
	resolver := desired.Resolver{Node: state.Node()}
	update := desired.Update{Family: family, Full: true}
	for name := range state.All() {
		if service, ok := resolver.Resolve(state, name); ok {
			update.Changes = append(update.Changes, desired.Change{Name: name, After: service})
		}
	}
	slices.SortFunc(update.Changes, func(a, b desired.Change) int { return a.Name.Compare(b.Name) })
	return update
}

// newEngine returns an engine for one IP family.
func newEngine(name string, family v1.IPFamily) (engine proxier.Engine, err error) {
	switch name {
	case "nftables":
		engine, err = nftables.NewEngine(nftables.Config{}, family, proxier.Deps{})
	case "iptables":
		engine, err = iptables.NewEngine(iptables.Config{}, family, proxier.Deps{})
	case "ipvs":
		engine, err = ipvs.NewEngine(ipvs.Config{}, family, proxier.Deps{})
	case "ebpf":
		engine, err = ebpf.NewEngine(ebpf.Config{Sockets: ebpf.Sockets{Cgroups: []string{"/sys/fs/cgroup/kubepods.slice"}}}, family, proxier.Deps{})
	case "userspace":
		engine, err = userspace.NewEngine(userspace.Config{}, family, proxier.Deps{})
	default:
		err = fmt.Errorf("engine %q: want nftables, iptables, ipvs, ebpf or userspace", name)
	}
	return engine, err
}
