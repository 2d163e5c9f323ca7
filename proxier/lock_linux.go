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

// lock is abstract Unix sockets (unix(7)), by their names, one for each name that an
// instance owns. They are of the network namespace, as are the objects that they stand
// for, and go with the process.
type lock map[string]int

// backlog is for those who ask who has the lock between two syncs of its holder; more are
// refused. Two who wait ask some 250 times an hour. The kernel's own limit is 4096
// (net.core.somaxconn).
const backlog = 4096

// take takes what is not taken yet. If somebody else has one of the names it returns
// ErrInUse, and keeps none.
func (l *lock) take(c *Config, family v1.IPFamily, beside bool) error {
	var others []error
	for _, name := range c.Names.owned() {
		socket := socketName(name, family)
		if _, taken := (*l)[socket]; taken {
			continue
		}
		err := namespace.Visit(c.NetNS, func() error { return l.bind(socket, name, family, beside) })
		if errors.As(err, new(otherUserError)) {
			others = append(others, err)
		} else if err != nil {
			l.release()
			return err
		}
	}
	return errors.Join(others...)
}

func (l *lock) bind(socket string, name [2]string, family v1.IPFamily, beside bool) error {
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
			return fmt.Errorf("lock the names: %w", err)
		}
		who, own, err := holder(address)
		if err != nil || own && beside {
			return err
		}
		if !own || attempt == forkAttempts {
			return inUse(name, family, who)
		}
		<-time.After(forkPause)
	}
}

// A program that this process starts has a copy of a socket that was closed just now,
// until its first instruction (execve(2)).
const (
	forkAttempts = 5
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

// socketName begins with "@", which package syscall takes for the abstract name space.
// Its limit is 107 bytes.
func socketName(name [2]string, family v1.IPFamily) string {
	text := name[1]
	if len(text) > 60 {
		text = fmt.Sprintf("%x", sha256.Sum224([]byte(text)))
	}
	return "@serviceplane/" + name[0] + "/" + text + "/" + string(family)
}

func unixSocket() (int, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	return fd, os.NewSyscallError("socket", err)
}

// holder asks the kernel who has a lock: whoever called listen (SO_PEERCRED). own says
// that it is this process.
func holder(address syscall.Sockaddr) (who string, own bool, err error) {
	fd, err := unixSocket()
	if err != nil {
		return "", false, err
	}
	defer func() { _ = syscall.Close(fd) }()
	err = syscall.Connect(fd, address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "a process that has just ended, or begun", false, nil
	}
	if err != nil { // nobody takes those who ask out of the queue, as a holder of ours does
		return "", false, otherUserError{fmt.Errorf("somebody who answers nobody has taken its name: %w", err)}
	}
	peer, err := syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	switch {
	case err != nil:
		return "another process", false, nil
	case peer.Uid != 0 && int(peer.Uid) != os.Geteuid():
		return "", false, otherUserError{fmt.Errorf("user %d, %s, has taken its name", peer.Uid, process(peer.Pid))}
	case int(peer.Pid) == os.Getpid():
		return "another Provider of this process", true, nil
	}
	return process(peer.Pid), false, nil
}

// process names a process by its number and command, "process 4711 (nodeproxy)".
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

// tidy forgets those who have asked.
func (l *lock) tidy() {
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

func (l *lock) release() {
	for _, socket := range *l {
		_ = syscall.Close(socket)
	}
	*l = nil
}
