package userspace

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// NetshOptions are the options of NewNetsh. The zero value suits a Windows node.
type NetshOptions struct {
	// Interface is the name of the network interface that gets the addresses; empty
	// means "vEthernet (HNS Internal NIC)", which a Windows node with containers has.
	// kube-proxy read it from the environment variable INTERFACE_TO_ADD_SERVICE_IP; this
	// package does not.
	Interface string
	// Command is the program to run; empty means "netsh".
	Command string
	// Timeout is how long one change may take; 0 means 10s.
	Timeout time.Duration
	// Local lists the addresses of this machine; nil means net.InterfaceAddrs.
	Local func() ([]netip.Addr, error)
}

const netshPoll = 50 * time.Millisecond

// NewNetsh returns the Addresses of a Windows node: it runs netsh to add each VIP to a
// network interface. It needs administrator rights.
//
// An address that is present already is used and never removed. Windows drops the added
// addresses when the machine restarts, but keeps them when only the program restarts.
//
// The errors contain the output of netsh.
func NewNetsh(options NetshOptions) Addresses {
	options.Interface = cmp.Or(options.Interface, "vEthernet (HNS Internal NIC)")
	options.Command = cmp.Or(options.Command, "netsh")
	options.Timeout = cmp.Or(options.Timeout, 10*time.Second)
	if options.Local == nil {
		options.Local = func() ([]netip.Addr, error) { return lightdeps.LocalAddresses("") }
	}
	return &netsh{options: options, added: map[netip.Addr]bool{}}
}

type netsh struct {
	options NetshOptions

	mu    sync.Mutex // guards added; held while netsh runs, for one change at a time
	added map[netip.Addr]bool
}

// Add implements Addresses.
func (n *netsh) Add(ctx context.Context, addr netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	present, err := n.has(addr)
	if err != nil || present {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, n.options.Timeout)
	defer stop()
	err = n.run(ctx, n.addArguments(addr))
	if err == nil || ctx.Err() != nil { // an interrupted netsh may have added it
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
	if present, err := n.has(addr); err != nil {
		return err
	} else if present {
		ctx, stop := context.WithTimeout(ctx, n.options.Timeout)
		defer stop()
		if err := n.run(ctx, n.deleteArguments(addr)); err != nil {
			return err
		}
	}
	delete(n.added, addr)
	return nil
}

// addArguments returns the arguments of "netsh interface ipv4 add address", or ipv6:
// https://learn.microsoft.com/windows-server/administration/windows-commands/netsh-interface.
// store=active means until Windows restarts. skipassource=true means that connections
// of the node never use the address as their source.
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

// await waits until the system lists an address; netsh returns earlier.
func (n *netsh) await(ctx context.Context, addr netip.Addr) error {
	for {
		present, err := n.has(addr)
		if err != nil || present {
			return err
		}
		if !pause.For(ctx, netshPoll) {
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
