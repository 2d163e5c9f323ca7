package ipvs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// device is the dummy network device that holds the VIPs, so that the node delivers packets
// for them locally. Both families share it.
type device struct {
	name   string
	mark   net.HardwareAddr
	family int
	lists  *netlinkx.Socket  // and single changes
	socket *nl.NetlinkSocket // for batches
	// adopts means that a device of kube-proxy is taken over.
	adopts bool
	// index is 0 if the device does not exist; then foreign describes another program's
	// device with the same name, if there is one.
	index   int
	foreign string
}

func openDevice(netNS string, names proxier.Names, family int) (d *device, err error) {
	d = &device{name: names.Device, mark: markOf(names), adopts: names == proxier.KubeProxyNames(), family: family}
	err = namespace.Visit(netNS, func() error {
		var errLists, errSocket error
		d.lists, errLists = netlinkx.Open("")
		d.socket, errSocket = netlinkx.Limited(nl.Subscribe(unix.NETLINK_ROUTE))
		return errors.Join(errLists, errSocket)
	})
	if err != nil {
		d.close()
		return nil, fmt.Errorf("open netlink sockets: %w", err)
	}
	return d, nil
}

func (d *device) close() {
	if d.lists != nil {
		d.lists.Close()
	}
	if d.socket != nil {
		d.socket.Close()
	}
}

// markPrefix is the prefix of the hardware addresses of all instances. Its first byte makes
// them locally administered unicast addresses (RFC 9542, section 2.1).
const markPrefix = "ZSP"

// markOf is the hardware address of an instance's device, by which a later process
// recognizes it. An alias would not do: the kernel can set it only after the creation.
func markOf(n proxier.Names) net.HardwareAddr {
	sum := sha256.Sum256([]byte(strings.Join([]string{n.Instance, n.Table, n.ChainPrefix, n.Device}, "\x00")))
	return append(net.HardwareAddr(markPrefix), sum[:3]...)
}

// ensure creates the device, unless it exists. The device stays down: its addresses are
// local all the same, and it answers no ARP requests.
func (d *device) ensure() error {
	if err := d.find(); err != nil || d.index != 0 {
		return err
	}
	err := d.lists.Routing().LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.name, HardwareAddr: d.mark}})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return missing("network device of type dummy", "dummy", err)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add device %s: %w", d.name, netlinkx.Denied(err))
	}
	if err := d.find(); err != nil || d.foreign == "" {
		return err
	}
	return fmt.Errorf("add device %s: the name is taken by %s: set another Names.Device, or, if the device is not needed, run ip link delete %s",
		d.name, d.foreign, d.name)
}

// find finds the device, and marks one that it adopts.
func (d *device) find() error {
	d.index, d.foreign = 0, ""
	link, err := d.link()
	if err != nil || link == nil {
		return err
	}
	mark := link.Attrs().HardwareAddr
	switch isDummy := link.Type() == "dummy"; {
	case isDummy && bytes.Equal(mark, d.mark):
	case isDummy && d.adopts && !bytes.HasPrefix(mark, []byte(markPrefix)):
		if err := d.lists.Routing().LinkSetHardwareAddr(link, d.mark); err != nil {
			return fmt.Errorf("adopt device %s: %w", d.name, netlinkx.Denied(err))
		}
	case bytes.HasPrefix(mark, []byte(markPrefix)):
		d.foreign = "the device of another instance"
		return nil
	default:
		d.foreign = "a device of type " + link.Type() + " of another program"
		return nil
	}
	d.index = link.Attrs().Index
	return nil
}

// link returns the link with the name of the device, nil if there is none.
func (d *device) link() (netlink.Link, error) {
	link, err := d.lists.Routing().LinkByName(d.name) //nolint:forbidigo // requests one device only
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", d.name, err)
	}
	return link, nil
}

func (d *device) isOn(link int) bool { return d.index != 0 && link == d.index }

// addresses lists the family's addresses: of the device, and of all other links.
func (d *device) addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error) {
	list, err := netlinkx.AddrList(d.lists, d.family)
	if err != nil {
		return nil, nil, fmt.Errorf("list addresses: %w", err)
	}
	here = map[netip.Addr]bool{}
	for i := range list {
		addr := addrOf(list[i].IP)
		if d.isOn(list[i].LinkIndex) {
			here[addr] = true
			continue
		}
		elsewhere = append(elsewhere, addr)
	}
	return here, elsewhere, nil
}

// batch is how many addresses are sent at a time; the responses must fit into the socket's
// buffer.
const batch = 64

// add adds addresses to the device.
func (d *device) add(addrs []netip.Addr) error { return d.change(unix.RTM_NEWADDR, addrs, unix.EEXIST) }

// remove removes addresses from the device.
func (d *device) remove(addrs []netip.Addr) error {
	return d.change(unix.RTM_DELADDR, addrs, unix.EADDRNOTAVAIL)
}

// change sends a message for each address, in batches. The error done is success: there
// was nothing to do.
func (d *device) change(message int, addrs []netip.Addr, done unix.Errno) error {
	var errs []error
	for some := range slices.Chunk(addrs, batch) {
		errs = append(errs, d.changeSome(message, some, done))
	}
	return errors.Join(errs...)
}

func (d *device) changeSome(message int, addrs []netip.Addr, done unix.Errno) error {
	var buffer []byte
	waiting := map[uint32]netip.Addr{}
	for _, addr := range addrs {
		flags := unix.NLM_F_ACK
		if message == unix.RTM_NEWADDR {
			flags |= unix.NLM_F_CREATE | unix.NLM_F_EXCL
		}
		request := nl.NewNetlinkRequest(message, flags)
		m := nl.NewIfAddrmsg(d.family)
		m.Index, m.Prefixlen, m.Scope = uint32(d.index), uint8(addr.BitLen()), unix.RT_SCOPE_UNIVERSE
		request.AddData(m)
		request.AddData(nl.NewRtAttr(unix.IFA_LOCAL, addr.AsSlice()))
		request.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, addr.AsSlice()))
		if d.family == unix.AF_INET6 { // without duplicate address detection, which takes a second
			request.AddData(nl.NewRtAttr(unix.IFA_FLAGS, nl.Uint32Attr(unix.IFA_F_NODAD)))
		}
		waiting[request.Seq] = addr
		buffer = append(buffer, request.Serialize()...)
	}
	if err := unix.Sendto(d.socket.GetFd(), buffer, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("change addresses of device %s: %w", d.name, netlinkx.Denied(err))
	}
	return d.receive(waiting, done)
}

func (d *device) receive(waiting map[uint32]netip.Addr, done unix.Errno) error {
	var errs []error
	for len(waiting) > 0 {
		messages, _, err := d.socket.Receive()
		if err != nil {
			return fmt.Errorf("change addresses of device %s: %w", d.name, err)
		}
		for _, m := range messages {
			addr, ours := waiting[m.Header.Seq]
			if !ours || m.Header.Type != unix.NLMSG_ERROR { // late, of an earlier call
				continue
			}
			delete(waiting, m.Header.Seq)
			errno := unix.Errno(-int32(nl.NativeEndian().Uint32(m.Data[:4])))
			if errno != 0 && errno != done {
				errs = append(errs, fmt.Errorf("change address %v of device %s: %w", addr, d.name, netlinkx.Denied(errno)))
			}
		}
	}
	return errors.Join(errs...)
}

// delete removes the addresses of the family, and the device if it has no others. Another
// program's device stays as it is.
func (d *device) delete() error {
	if err := d.find(); err != nil || d.index == 0 {
		return err
	}
	here, _, err := d.addresses()
	if err != nil {
		return err
	}
	if err := d.remove(slices.Collect(maps.Keys(here))); err != nil {
		return err
	}
	list, err := netlinkx.AddrList(d.lists, unix.AF_UNSPEC)
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for i := range list {
		if list[i].LinkIndex == d.index && !list[i].IP.IsLinkLocalUnicast() {
			return nil // the other family still uses it
		}
	}
	err = d.lists.Routing().LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.name, Index: d.index}})
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete device %s: %w", d.name, err)
	}
	return nil
}

// otherAddresses lists the addresses of all links of the node but those with the name of the device.
func otherAddresses(c *Config) ([]netip.Addr, error) {
	d, err := openDevice(c.NetNS, c.Names, unix.AF_UNSPEC)
	if err != nil {
		return nil, err
	}
	defer d.close()
	link, err := d.link()
	if err != nil {
		return nil, err
	}
	if link != nil {
		d.index = link.Attrs().Index
	}
	_, addrs, err := d.addresses()
	return addrs, err
}
