package ebpf

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// Add adds a network namespace, by a path such as /proc/4711/ns/net or its name under /run/netns.
// It stays in the list when it ends: its number is never used again.
func (n *Namespaces) Add(netNS string) error {
	cookie, err := cookieOf(netNS)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cookies == nil {
		n.cookies = map[uint64]bool{}
	}
	n.cookies[cookie] = true
	var errs []error
	for user := range n.users {
		errs = append(errs, user.add(cookie))
	}
	return errors.Join(errs...)
}

// Remove removes a network namespace.
func (n *Namespaces) Remove(netNS string) error {
	cookie, err := cookieOf(netNS)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cookies, cookie)
	var errs []error
	for user := range n.users {
		errs = append(errs, user.remove(cookie))
	}
	return errors.Join(errs...)
}

// use calls a user for all changes from now on, and returns what is in the list now.
func (n *Namespaces) use(user *namespaceUser, now func(cookies map[uint64]bool) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.users == nil {
		n.users = map[*namespaceUser]bool{}
	}
	n.users[user] = true
	return now(n.cookies)
}

func (n *Namespaces) leave(user *namespaceUser) {
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
