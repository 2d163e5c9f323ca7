package proxier

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
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

// TestACopyOfAKilledProcessIsNobodys: a process may be killed while a child of it is between fork and execve. The
// child has the lock for a moment, and the next process waits for that.
func TestACopyOfAKilledProcessIsNobodys(t *testing.T) {
	ns, name := netnstest.New(t), ownedName{"table", "serviceplane"}
	socket := socketName(name, v1.IPv4Protocol)
	netnstest.Check(t, ns.Do(func() error {
		process := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLeaveACopy$")
		process.Env = append(os.Environ(), leftSocket+"="+socket)
		out, err := process.Output()
		if err != nil {
			return err
		}
		child, err := strconv.Atoi(strings.Fields(string(out))[0])
		if err != nil {
			return err
		}
		who, own, err := holder(&syscall.SockaddrUnix{Name: socket})
		if killed := syscall.Kill(child, syscall.SIGKILL); who != startingOrEnding || own || err != nil || killed != nil {
			t.Errorf("held by %q (own: %t, %v, child: %v), want %s", who, own, err, killed, startingOrEnding)
		}
		var next lock
		defer next.release()
		return next.bind(socket, name, v1.IPv4Protocol, false)
	}))
}

const leftSocket = "SERVICEPLANE_TEST_LEFT_SOCKET"

// TestLeaveACopy is the process of TestACopyOfAKilledProcessIsNobodys. It prints the ID of its child.
func TestLeaveACopy(t *testing.T) {
	socket := os.Getenv(leftSocket)
	if socket == "" {
		return // without Skip, which the test script reports as a failure
	}
	fd, err := listenAt(&syscall.SockaddrUnix{Name: socket})
	netnstest.Check(t, err)
	child := exec.Command("sleep", "1000")
	child.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), socket)}
	netnstest.Check(t, child.Start())
	_, _ = os.Stdout.WriteString(strconv.Itoa(child.Process.Pid) + "\n")
	os.Exit(0)
}

// A lock is taken again at once, also by a program that starts other programs all the time.
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
