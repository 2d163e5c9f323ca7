package userspace

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/internal/lightdeps"
)

// NetshOptions are the options of NewNetsh. The zero value is fit for a Windows node.
type NetshOptions struct {
	// Interface is the name of the network interface that gets the addresses; empty
	// means "vEthernet (HNS Internal NIC)", which a Windows node with containers has.
	// kube-proxy took it from the environment variable INTERFACE_TO_ADD_SERVICE_IP: a
	// program that wants to go on with that reads it itself.
	Interface string
	// Command is the program to run; empty means "netsh".
	Command string
	// Timeout is how long one change may take, until the address can be seen or is
	// gone; 0 means 10s.
	Timeout time.Duration
	// Local lists the addresses of this machine; nil means net.InterfaceAddrs.
	Local func() ([]netip.Addr, error)
}

const (
	defaultNetshInterface = "vEthernet (HNS Internal NIC)"
	defaultNetshTimeout   = 10 * time.Second
	netshPoll             = 50 * time.Millisecond
)

// NewNetsh returns Addresses of a Windows node: each VIP becomes an address of a
// network interface, by netsh(1). It needs the rights of an administrator.
//
// An address that is there already is used and never removed, whoever added it. What
// was added is not kept by Windows over a restart of the machine; it is, over one of
// the program, if that has not removed it.
//
// The errors tell what netsh printed.
func NewNetsh(options NetshOptions) Addresses {
	setDefault(&options.Interface, defaultNetshInterface)
	setDefault(&options.Command, "netsh")
	setDefault(&options.Timeout, defaultNetshTimeout)
	if options.Local == nil {
		options.Local = func() ([]netip.Addr, error) { return lightdeps.LocalAddresses("") }
	}
	return &netsh{options: options, added: map[netip.Addr]bool{}}
}

type netsh struct {
	options NetshOptions

	mu    sync.Mutex // held while a program runs: one change after the other
	added map[netip.Addr]bool
}

// Add implements Addresses.
func (n *netsh) Add(ctx context.Context, addr netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	here, err := n.has(addr)
	if err != nil || here {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, n.options.Timeout)
	defer stop()
	err = n.run(ctx, n.addArguments(addr))
	if err == nil || ctx.Err() != nil { // in the latter case nobody knows: it was interrupted
		n.added[addr] = true
	}
	if err != nil {
		return err
	}
	return n.await(ctx, addr)
}

// Remove implements Addresses.
func (n *netsh) Remove(ctx context.Context, addr netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.added[addr] {
		return nil
	}
	if here, err := n.has(addr); err != nil {
		return err
	} else if here {
		ctx, stop := context.WithTimeout(ctx, n.options.Timeout)
		defer stop()
		if err := n.run(ctx, n.deleteArguments(addr)); err != nil {
			return err
		}
	}
	delete(n.added, addr)
	return nil
}

// addArguments are those of "netsh interface ipv4 add address" and its like of IPv6:
// https://learn.microsoft.com/windows-server/administration/windows-commands/netsh-interface.
// The store "active" is what is lost when Windows starts again, and an address that is
// skipped as a source is never chosen for connections that the node opens.
func (n *netsh) addArguments(addr netip.Addr) []string {
	if addr.Is4() {
		return []string{
			"interface", "ipv4", "add", "address", "name=" + n.options.Interface,
			"address=" + addr.String(), "mask=255.255.255.255", "store=active", "skipassource=true",
		}
	}
	return []string{
		"interface", "ipv6", "add", "address", "interface=" + n.options.Interface,
		"address=" + addr.String() + "/128", "store=active", "skipassource=true",
	}
}

func (n *netsh) deleteArguments(addr netip.Addr) []string {
	if addr.Is4() {
		return []string{"interface", "ipv4", "delete", "address", "name=" + n.options.Interface, "address=" + addr.String()}
	}
	return []string{
		"interface", "ipv6", "delete", "address", "interface=" + n.options.Interface, "address=" + addr.String(), "store=active",
	}
}

func (n *netsh) run(ctx context.Context, arguments []string) error {
	out, err := exec.CommandContext(ctx, n.options.Command, arguments...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("run %s %q: %w: %s", n.options.Command, arguments, err, bytes.TrimSpace(out))
	}
	return nil
}

// await returns when an address can be seen: netsh does not wait for that.
func (n *netsh) await(ctx context.Context, addr netip.Addr) error {
	tick := time.NewTicker(netshPoll)
	defer tick.Stop()
	for {
		here, err := n.has(addr)
		if err != nil || here {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for address %v on %q: %w", addr, n.options.Interface, ctx.Err())
		}
	}
}

func (n *netsh) has(addr netip.Addr) (bool, error) {
	local, err := n.options.Local()
	if err != nil {
		return false, fmt.Errorf("list local addresses: %w", err)
	}
	return slices.Contains(local, addr), nil
}
