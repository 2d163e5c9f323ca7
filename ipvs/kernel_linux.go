package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// netlinkKernel is the kernel over netlink. One goroutine at a time may use it.
type netlinkKernel struct {
	handle *ipvs.Handle
	netNS  string
	family uint16
}

// openKernel opens a socket in a network namespace, as in namespace.Visit. It checks for
// IPVS first, because package ipvs does not return an error without it.
func openKernel(netNS string, family v1.IPFamily) (k *netlinkKernel, err error) {
	err = namespace.Visit(netNS, func() error {
		if err := findIPVS(); err != nil {
			return err
		}
		handle, err := ipvs.New("")
		if err != nil {
			return fmt.Errorf("open netlink socket: %w", netlinkx.Denied(err))
		}
		k = &netlinkKernel{handle: handle, netNS: netNS, family: uint16(number(family))}
		return nil
	})
	return k, err
}

// number is the kernel's number of an IP family.
func number(family v1.IPFamily) int {
	if family == v1.IPv6Protocol {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func findIPVS() error {
	_, err := netlink.GenlFamilyGet("IPVS")
	if errors.Is(err, unix.ENOENT) && loadIPVS() == nil {
		_, err = netlink.GenlFamilyGet("IPVS")
	}
	if err != nil {
		return missing("IPVS", "ip_vs", err)
	}
	return nil
}

// loadIPVS makes a kernel load ip_vs that does not when its netlink family is requested, as
// Linux 5.10. Every kernel loads an extension of iptables when nf_tables is asked for its
// revision, and the match ipvs needs ip_vs.
func loadIPVS() error {
	const (
		compatGet   = 0 // NFNL_MSG_COMPAT_GET of linux/netfilter/nf_tables_compat.h
		typeMatch   = 0
		anyRevision = 0
	)
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFT_COMPAT<<8|compatGet, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: unix.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(unix.NFTA_COMPAT_NAME, nl.ZeroTerminated("ipvs")))
	request.AddData(nl.NewRtAttr(unix.NFTA_COMPAT_REV, binary.BigEndian.AppendUint32(nil, anyRevision)))
	request.AddData(nl.NewRtAttr(unix.NFTA_COMPAT_TYPE, binary.BigEndian.AppendUint32(nil, typeMatch)))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// ipvsLoaded reports whether IPVS is loaded.
func ipvsLoaded(netNS string) (loaded bool, err error) {
	err = namespace.Visit(netNS, func() error {
		_, err := os.Stat(procFile)
		loaded = err == nil
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return loaded, err
}

func missing(feature, module string, err error) error {
	return &proxier.UnsupportedError{Feature: feature, Hint: "load module " + module, Err: err}
}

func (k *netlinkKernel) Close() { k.handle.Close() }

// List implements kernel.
func (k *netlinkKernel) List() (map[serverKey]*virtual, error) {
	services, err := k.handle.GetServices()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", netlinkx.Denied(err))
	}
	all := map[serverKey]*virtual{}
	for _, s := range services {
		if s.AddressFamily != k.family || s.FWMark != 0 {
			continue
		}
		v, err := k.virtual(s)
		if err != nil {
			return nil, err
		}
		all[serverKey{VIP: addrOf(s.Address), Protocol: desired.Protocol(s.Protocol), Port: s.Port}] = v
	}
	return all, nil
}

// virtual returns a virtual server with its real servers.
func (k *netlinkKernel) virtual(s *ipvs.Service) (*virtual, error) {
	v := &virtual{
		settings: settings{scheduler: s.SchedName, flags: s.Flags &^ flagHashed},
		reals:    map[netip.AddrPort]int{}, loads: loads{},
	}
	if v.flags&flagPersistent != 0 {
		v.timeout = time.Duration(s.Timeout) * time.Second
	}
	destinations, err := k.handle.GetDestinations(s)
	if err != nil {
		return nil, fmt.Errorf("list real servers: %w", err)
	}
	for _, d := range destinations {
		real := v.loads.add(d)
		v.reals[real] = d.Weight
		v.forward = methodOf(func(m method) bool { return m.flag == d.ConnectionFlags&ipvs.ConnectionFlagFwdMask })
	}
	return v, nil
}

// procFile lists all virtual servers of a network namespace.
const procFile = "/proc/thread-self/net/ip_vs"

// ListFast implements kernel.
func (k *netlinkKernel) ListFast() (all map[serverKey]*virtual, err error) {
	var b []byte
	if err := namespace.Visit(k.netNS, func() (err error) { b, err = os.ReadFile(procFile); return err }); err != nil {
		return nil, netlinkx.Denied(err)
	}
	all, err = parseProc(b, func(a netip.Addr) bool { return a.Is4() == (k.family == unix.AF_INET) })
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", procFile, err)
	}
	return all, nil
}

// Get implements kernel.
func (k *netlinkKernel) Get(key serverKey) (*virtual, error) {
	s, err := k.handle.GetService(k.service(key, settings{}))
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("get virtual server %v: %w", key, netlinkx.Denied(err))
	}
	return k.virtual(s)
}

func addrOf(ip net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap()
}

// Loads implements kernel.
func (k *netlinkKernel) Loads(key serverKey) (loads, error) {
	destinations, err := k.handle.GetDestinations(k.service(key, settings{}))
	if err != nil {
		return nil, err
	}
	all := make(loads, len(destinations))
	for _, d := range destinations {
		all.add(d)
	}
	return all, nil
}

// add adds those of a real server.
func (l loads) add(d *ipvs.Destination) (real netip.AddrPort) {
	real = netip.AddrPortFrom(addrOf(d.Address), d.Port)
	l[real] = load{uint32(d.ActiveConnections + d.InactiveConnections), d.Stats.Connections}
	return real
}

// Put implements kernel. An update fails if another program has deleted the virtual server,
// because its real servers are gone too; after the error the engine reads everything.
func (k *netlinkKernel) Put(key serverKey, s settings, isNew bool) error {
	service, change := k.service(key, s), k.handle.UpdateService
	if isNew {
		change = k.handle.NewService
	}
	err := change(service)
	if errors.Is(err, unix.EEXIST) {
		err = k.handle.UpdateService(service)
	}
	if errors.Is(err, unix.ENOENT) {
		return missing("IPVS scheduler "+s.scheduler, "ip_vs_"+s.scheduler, err)
	}
	return netlinkx.Denied(err)
}

// Delete implements kernel.
func (k *netlinkKernel) Delete(key serverKey) error {
	if err := k.handle.DelService(k.service(key, settings{})); !errors.Is(err, unix.ESRCH) {
		return netlinkx.Denied(err)
	}
	return nil
}

// PutReal implements kernel.
func (k *netlinkKernel) PutReal(key serverKey, real netip.AddrPort, weight int, how ForwardingMethod, isNew bool) error {
	service, d := k.service(key, settings{}), k.destination(real, weight, how)
	if isNew {
		err := k.handle.NewDestination(service, d)
		if !errors.Is(err, unix.EEXIST) {
			return netlinkx.Denied(err)
		}
	}
	return netlinkx.Denied(k.handle.UpdateDestination(service, d))
}

// DeleteReal implements kernel.
func (k *netlinkKernel) DeleteReal(key serverKey, real netip.AddrPort) error {
	err := k.handle.DelDestination(k.service(key, settings{}), k.destination(real, 0, ForwardMasquerade))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return netlinkx.Denied(err)
}

// service converts a virtual server for package ipvs.
func (k *netlinkKernel) service(key serverKey, s settings) *ipvs.Service {
	netmask := uint32(math.MaxUint32) // session affinity distinguishes all client addresses
	if k.family == unix.AF_INET6 {
		netmask = net.IPv6len * 8
	}
	return &ipvs.Service{
		Address: key.VIP.AsSlice(), Port: key.Port, Protocol: uint16(key.Protocol), AddressFamily: k.family,
		SchedName: s.scheduler, Flags: s.flags, Timeout: uint32(s.timeout / time.Second), Netmask: netmask,
	}
}

func (k *netlinkKernel) destination(real netip.AddrPort, weight int, how ForwardingMethod) *ipvs.Destination {
	return &ipvs.Destination{
		Address: real.Addr().AsSlice(), Port: real.Port(), Weight: weight, AddressFamily: k.family,
		ConnectionFlags: methods[how].flag,
	}
}

// setTimeouts sets the timeouts that are not 0.
func (k *netlinkKernel) setTimeouts(c *Config) error {
	if c.TCPTimeout == 0 && c.TCPFinTimeout == 0 && c.UDPTimeout == 0 {
		return nil
	}
	err := k.handle.SetConfig(&ipvs.Config{TimeoutTCP: c.TCPTimeout, TimeoutTCPFin: c.TCPFinTimeout, TimeoutUDP: c.UDPTimeout})
	if err != nil {
		return fmt.Errorf("set timeouts: %w", netlinkx.Denied(err))
	}
	return nil
}

// sysctl is a kernel setting of a network namespace.
type sysctl struct {
	name, want string
	// needed means that the engine does not work without it.
	needed bool
	why    string
}

// The settings that are checked, see Documentation/networking/ipvs-sysctl.rst; arpSysctls
// with Config.StrictARP.
var (
	sysctls = []sysctl{ // read-only
		{"net/ipv4/vs/conntrack", "1", true, "nothing is masqueraded"},
		{"net/ipv4/vs/expire_nodest_conn", "1", false, "connections to a deleted real server hang"},
		{"net/ipv4/vs/expire_quiescent_template", "1", false, "clients with session affinity stay with a draining real server"},
		{"net/ipv4/ip_forward", "1", false, "packets do not reach endpoints on other nodes"},
	}
	arpSysctls = []sysctl{ // read-only
		{"net/ipv4/conf/all/arp_ignore", "1", false, "the node answers ARP requests for VIPs"},
		{"net/ipv4/conf/all/arp_announce", "2", false, "the node announces VIPs by ARP"},
	}
)

// checkSysctls checks the settings, and sets wrong ones if Config.SetSysctls is set. It
// passes those that remain wrong and are not needed to advise.
func (e *engine) checkSysctls(advise func(text string)) error {
	return namespace.Visit(e.config.NetNS, func() error {
		var errs []error
		settings := sysctls
		if e.config.StrictARP {
			settings = slices.Concat(sysctls, arpSysctls)
		}
		for _, s := range settings {
			err := s.check()
			if err != nil && e.config.SetSysctls {
				err = s.set()
			}
			if err != nil && s.needed {
				errs = append(errs, err)
			} else if err != nil {
				advise(err.Error())
			}
		}
		return errors.Join(errs...)
	})
}

func (s *sysctl) path() string { return "/proc/sys/" + s.name }

func (s *sysctl) check() error {
	have, err := os.ReadFile(s.path())
	if err != nil {
		return fmt.Errorf("read kernel setting %s: %w", s.name, netlinkx.Denied(err))
	}
	if got := strings.TrimSpace(string(have)); got != s.want {
		return fmt.Errorf("kernel setting %s is %s, want %s: otherwise %s: set it, or use Config.SetSysctls", s.name, got, s.want, s.why)
	}
	return nil
}

func (s *sysctl) set() error {
	if err := os.WriteFile(s.path(), []byte(s.want), 0); err != nil {
		return fmt.Errorf("set kernel setting %s to %s: %w", s.name, s.want, netlinkx.Denied(err))
	}
	return nil
}
