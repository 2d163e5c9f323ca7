package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// Add adds a network namespace, by a path such as /proc/4711/ns/net or its name under /run/netns.
// If the path was added before, and leads to another one now, that one takes its place.
func (n *Namespaces) Add(netNS string) error {
	cookie, err := cookieOf(netNS)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.names == nil {
		n.names = map[string]uint64{}
	}
	if before, listed := n.names[netNS]; listed && before != cookie {
		err = n.remove(netNS)
	}
	n.names[netNS] = cookie
	for user := range n.users {
		err = errors.Join(err, user.Put(cookie, uint32(1)))
	}
	return err
}

// Remove removes a network namespace that was added by this path. It may have ended meanwhile. It does
// nothing if there is none.
func (n *Namespaces) Remove(netNS string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.remove(netNS)
}

func (n *Namespaces) remove(netNS string) (err error) {
	cookie, listed := n.names[netNS]
	delete(n.names, netNS)
	if !listed || slices.Contains(slices.Collect(maps.Values(n.names)), cookie) { // by another path
		return nil
	}
	for user := range n.users {
		err = errors.Join(err, deleted(user, cookie))
	}
	return err
}

// use makes a map what the list is, now and at all changes until leave. A nil list is empty.
func (n *Namespaces) use(user *ebpf.Map) error {
	if n == nil {
		n = &Namespaces{}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.users == nil {
		n.users = map[cookies]bool{}
	}
	n.users[user] = true
	now := slices.Collect(maps.Values(n.names))
	var cookie uint64
	var value uint32
	var stale []uint64
	for each := user.Iterate(); each.Next(&cookie, &value); {
		if !slices.Contains(now, cookie) {
			stale = append(stale, cookie)
		}
	}
	var errs []error
	for _, cookie := range stale {
		errs = append(errs, deleted(user, cookie))
	}
	for _, cookie := range now {
		errs = append(errs, user.Put(cookie, uint32(1)))
	}
	return errors.Join(errs...)
}

// deleted deletes a key of a map, which may be gone.
func deleted(from interface{ Delete(key any) error }, key any) error {
	if err := from.Delete(key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (n *Namespaces) removeUser(user *ebpf.Map) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.users, user)
}

// cookieOf returns the number by which the kernel tells network namespaces apart (SO_NETNS_COOKIE,
// Linux 5.14).
func cookieOf(netNS string) (cookie uint64, err error) {
	err = namespace.Visit(netNS, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read the number of network namespace %q: %w", netNS, err)
	}
	return cookie, nil
}
