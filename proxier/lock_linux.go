package proxier

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"syscall"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// lock is an abstract Unix socket (unix(7)): its name is one of the network namespace,
// as are the objects that it stands for, and goes with the process.
type lock struct {
	fd   int
	open bool
}

func (l *lock) held() bool { return l.open }

// backlog is for those who ask who has the lock; more are refused.
const backlog = 64

// take returns ErrInUse if another process has the lock, and nil if it is ours or
// another's of this process.
func (l *lock) take(c *Config, family v1.IPFamily) error {
	address := &syscall.SockaddrUnix{Name: lockName(c.Names.Table, family)}
	return namespace.Visit(c.NetNS, func() error {
		fd, err := unixSocket()
		if err != nil {
			return err
		}
		if err = syscall.Bind(fd, address); err == nil {
			err = syscall.Listen(fd, backlog)
		}
		if err == nil {
			l.fd, l.open = fd, true
			return nil
		}
		_ = syscall.Close(fd)
		if !errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("lock the names: %w", os.NewSyscallError("bind", err))
		}
		return judgeHolder(c, address)
	})
}

// lockName begins with "@", which package syscall takes for the abstract name space.
// Its limit is 107 bytes.
func lockName(table string, family v1.IPFamily) string {
	if len(table) > 60 {
		table = fmt.Sprintf("%x", sha256.Sum224([]byte(table)))
	}
	return "@serviceplane/" + table + "/" + string(family)
}

func unixSocket() (int, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	return fd, os.NewSyscallError("socket", err)
}

// judgeHolder asks the kernel who has the lock: whoever called listen (SO_PEERCRED).
func judgeHolder(c *Config, address syscall.Sockaddr) error {
	fd, err := unixSocket()
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	err = syscall.Connect(fd, address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return inUse(c, "a process that has just ended, or begun")
	}
	if err != nil { // too many ask
		return inUse(c, "another process")
	}
	who, err := syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	switch {
	case err != nil:
		return inUse(c, "another process")
	case who.Uid != 0 && int(who.Uid) != os.Geteuid():
		return squatted{fmt.Errorf("user %d, %s, has taken its name", who.Uid, process(who.Pid))}
	case int(who.Pid) == os.Getpid():
		return nil
	}
	return inUse(c, process(who.Pid))
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
	for l.open {
		fd, _, err := syscall.Accept4(l.fd, syscall.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		_ = syscall.Close(fd)
	}
}

func (l *lock) release() {
	if l.open {
		_ = syscall.Close(l.fd)
		l.open = false
	}
}
