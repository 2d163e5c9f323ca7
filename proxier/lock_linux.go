package proxier

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// lock holds one abstract Unix socket (unix(7)) for each name that an instance owns, by
// address. Abstract sockets belong to the network namespace, like the objects that they
// protect, and the kernel closes them when the process ends.
type lock map[string]int

// backlog bounds the queue of connections from processes that ask who holds the lock. The
// holder drains it in its syncs. Two waiting processes connect about 250 times an hour. The
// kernel's default limit is 4096 (net.core.somaxconn).
const backlog = 4096

// acquire takes the names that it does not hold yet. If another instance holds one of them, it
// returns ErrInUse and releases all.
func (l *lock) acquire(c *Config, family v1.IPFamily, allowOwn bool) error {
	var foreign []error
	for _, name := range c.Names.owned() {
		socket := socketName(name, family)
		if _, taken := (*l)[socket]; taken {
			continue
		}
		err := namespace.Visit(c.NetNS, func() error { return l.bind(socket, name, family, allowOwn) })
		if errors.As(err, new(foreignLockError)) {
			foreign = append(foreign, err)
		} else if err != nil {
			l.release()
			return err
		}
	}
	return errors.Join(foreign...)
}

func (l *lock) bind(socket string, name ownedName, family v1.IPFamily, allowOwn bool) error {
	address := &syscall.SockaddrUnix{Name: socket}
	for attempt := 0; ; attempt++ {
		fd, err := listenAt(address)
		if err == nil {
			if *l == nil {
				*l = lock{}
			}
			(*l)[socket] = fd
			return nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("take the lock of the names: %w", err)
		}
		who, own, err := holder(address)
		if err != nil || own && allowOwn {
			return err
		}
		if !own && who != startingOrEnding || attempt == forkAttempts {
			return inUseError(name, family, who)
		}
		<-time.After(forkPause)
	}
}

// Another process may be between bind and listen, or a child of it between fork and execve(2),
// with a copy of a closed socket: then connect is refused. Or the process was killed, and such a child
// is left for a moment.
const (
	startingOrEnding = "a process that is starting or ending"

	forkAttempts = 50
	forkPause    = 10 * time.Millisecond
)

func listenAt(address syscall.Sockaddr) (int, error) {
	fd, err := unixSocket()
	if err != nil {
		return 0, err
	}
	if err = syscall.Bind(fd, address); err == nil {
		err = syscall.Listen(fd, backlog)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return 0, os.NewSyscallError("bind", err)
	}
	return fd, nil
}

// socketName begins with "@": package syscall then uses the abstract namespace. An
// address has at most 107 bytes.
func socketName(n ownedName, family v1.IPFamily) string {
	text := n.name
	if len(text) > 60 {
		text = fmt.Sprintf("%x", sha256.Sum224([]byte(text)))
	}
	return "@serviceplane/" + n.kind + "/" + text + "/" + string(family)
}

func unixSocket() (int, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	return fd, os.NewSyscallError("socket", err)
}

// holder returns the process that holds a lock: the one that called listen, which the
// kernel reports as SO_PEERCRED. own reports whether it is this process.
func holder(address syscall.Sockaddr) (who string, own bool, err error) {
	fd, err := unixSocket()
	if err != nil {
		return "", false, err
	}
	defer func() { _ = syscall.Close(fd) }()
	err = syscall.Connect(fd, address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return startingOrEnding, false, nil
	}
	if err != nil { // the queue is full; a serviceplane process drains it
		return "", false, foreignLockError{fmt.Errorf("a process that does not accept connections holds it: %w", err)}
	}
	peer, err := syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	switch {
	case err != nil:
		return "another process", false, nil
	case peer.Pid != 0 && errors.Is(syscall.Kill(int(peer.Pid), 0), syscall.ESRCH): // a child of it has a copy
		return startingOrEnding, false, nil
	case peer.Uid != 0 && int(peer.Uid) != os.Geteuid():
		return "", false, foreignLockError{fmt.Errorf("%s of user %d holds it", process(peer.Pid), peer.Uid)}
	case int(peer.Pid) == os.Getpid():
		return "another Provider of this process", true, nil
	}
	return process(peer.Pid), false, nil
}

// process returns a process's ID and command, like "process 4711 (nodeproxy)".
func process(pid int32) string {
	if pid == 0 {
		return "a process of another PID namespace"
	}
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return fmt.Sprintf("process %d", pid)
	}
	return fmt.Sprintf("process %d (%s)", pid, bytes.TrimSpace(command))
}

// drainQueue closes the connections of processes that asked who holds the lock.
func (l *lock) drainQueue() {
	for _, socket := range *l {
		for {
			fd, _, err := syscall.Accept4(socket, syscall.SOCK_CLOEXEC)
			if err != nil {
				break
			}
			_ = syscall.Close(fd)
		}
	}
}

// release waits until no child of this process is between fork and execve(2), which would have a
// copy of each socket, and so the lock. execve closes the copy soon after package syscall goes on.
func (l *lock) release() {
	if len(*l) > 0 {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
	}
	for _, socket := range *l {
		// A child that was not made by package syscall may still have a copy. It must not count as this process.
		_ = syscall.Shutdown(socket, syscall.SHUT_RDWR)
		_ = syscall.Close(socket)
	}
	*l = nil
}
