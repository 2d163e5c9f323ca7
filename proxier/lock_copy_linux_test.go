package proxier

import (
	"os/exec"
	"sync"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestACopyOfAReleasedLockIsNobodys: a child process has a copy of the socket of a lock between
// fork and execve. A Provider that starts meanwhile waits for the end of the copy, instead of
// reporting that another one of this process runs.
func TestACopyOfAReleasedLockIsNobodys(t *testing.T) {
	ns, name := netnstest.New(t), ownedName{"table", "serviceplane"}
	socket := socketName(name, v1.IPv4Protocol)
	netnstest.Check(t, ns.Do(func() error {
		var first, second lock
		if err := first.bind(socket, name, v1.IPv4Protocol, false); err != nil {
			return err
		}
		address := &syscall.SockaddrUnix{Name: socket}
		if who, own, err := holder(address); !own || err != nil {
			t.Errorf("held by %q (own: %t, %v), want that it is this process", who, own, err)
		}
		replica, err := syscall.Dup(first[socket])
		if err != nil {
			return err
		}
		first.release()
		if who, own, err := holder(address); who != startingOrEnding || own || err != nil {
			t.Errorf("after the release it is held by %q (own: %t, %v), want %s", who, own, err, startingOrEnding)
		}
		if err := syscall.Close(replica); err != nil {
			return err
		}
		defer second.release()
		return second.bind(socket, name, v1.IPv4Protocol, false)
	}))
}

// TestALockIsTakenAgainAtOnce: also by a program that starts other programs all the time.
func TestALockIsTakenAgainAtOnce(t *testing.T) {
	ns, name := netnstest.New(t), ownedName{"table", "serviceplane"}
	socket, enough := socketName(name, v1.IPv4Protocol), make(chan struct{})
	var starting sync.WaitGroup
	for range 4 {
		starting.Go(func() {
			for !isClosed(enough) {
				if err := exec.CommandContext(t.Context(), "true").Run(); err != nil {
					t.Errorf("start a program: %v", err)
					return
				}
			}
		})
	}
	err := ns.Do(func() error {
		for range 2000 {
			var l lock
			if err := l.bind(socket, name, v1.IPv4Protocol, false); err != nil {
				return err
			}
			l.release()
		}
		return nil
	})
	close(enough)
	starting.Wait()
	netnstest.Check(t, err)
}
