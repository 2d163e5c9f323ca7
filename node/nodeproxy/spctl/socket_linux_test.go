package spctl_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestASocketOfSomebodyElseIsNotBelieved: who can make a file where the command looks for a socket could
// tell root anything.
func TestASocketOfSomebodyElseIsNotBelieved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to listen as somebody else")
	}
	path := filepath.Join(t.TempDir(), "debug.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	listened := make(chan error, 1)
	go func() { // the kernel notes who calls listen
		const nobody, unchanged = 65534, ^uintptr(0)
		runtime.LockOSThread() // which ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, unchanged, nobody, unchanged); errno != 0 {
			listened <- errno
			return
		}
		listened <- unix.Listen(fd, 1)
	}()
	if err := <-listened; err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, "unix://"+path, "status"); err == nil || !strings.Contains(err.Error(), "neither root's nor of your own user (run this as the user of the proxy)") {
		t.Errorf("status = %q, %v, want an error about the socket's process", out, err)
	}
}
