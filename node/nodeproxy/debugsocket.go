package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/neterror"
	"github.com/serviceplane/serviceplane/internal/peer"
	"github.com/serviceplane/serviceplane/node/healthcheck"
)

// noSocket is the value of --debug-socket for none.
const noSocket = "off"

// debugSocket is the flag of the debug handler's socket.
type debugSocket struct{ path string }

func (s *debugSocket) register(f *pflag.FlagSet) {
	f.StringVar(&s.path, "debug-socket", "", "unix socket of the debug page and of spctl, which only root may connect to; default is debug.sock in --state-dir, or debug-NAME.sock with --instance=NAME, if nodeproxy runs as root; off for none")
}

// socketPath returns the path of the socket; empty for none.
func (o *options) socketPath() string {
	switch {
	case o.debugSocket.path == noSocket:
		return ""
	case o.debugSocket.path != "":
		return o.debugSocket.path
	case os.Geteuid() != 0:
		return ""
	}
	name := "debug.sock"
	if o.instance != "" {
		name = "debug-" + o.instance + ".sock"
	}
	return filepath.Join(o.stateDir, name)
}

// socketServer returns the task that serves a handler at the socket. A socket that cannot be
// opened does not end the proxy.
func (o *options) socketServer(handler http.Handler, log *zap.Logger) []task {
	path := o.socketPath()
	if path == "" {
		return nil
	}
	server := &healthcheck.Server{Name: "debug socket", Address: path, Handler: handler, Logger: log, Listen: listenOnSocket}
	return []task{{"debug socket", server.Run}}
}

// listenOnSocket listens on a socket that only root and the process's own user may connect
// to. It replaces the socket of a process that has ended: a lock beside it tells, so that of
// several processes that start at once only one does. Closing the listener removes both, unless
// they are another process's by now: somebody may remove them, and then that process can start.
func listenOnSocket(ctx context.Context, _, path string) (_ net.Listener, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	release, err := ownSocket(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	if err := removeSocket(ctx, path); err != nil {
		return nil, err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	socket := listener.(*net.UnixListener)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	file, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	socket.SetUnlinkOnClose(false) // it would remove any
	return &privateListener{UnixListener: socket, path: path, file: file, release: sync.OnceFunc(release)}, nil
}

var errListens = errors.New("another process listens")

// removeSocket removes the socket that a process left behind. It is an error if a process
// listens on it.
func removeSocket(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is a file, and no socket: remove it, or choose another path with --debug-socket", path)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path) // of a process without the lock
	if err == nil {
		_ = conn.Close()
	}
	if !neterror.Refused.Is(err) {
		return listens(path)
	}
	return os.Remove(path)
}

func listens(path string) error {
	return fmt.Errorf("%w on %s: stop it, or choose another path with --debug-socket", errListens, path)
}

// removeLeftSocket removes the socket of a process that was killed.
func (o *options) removeLeftSocket(ctx context.Context) error {
	path := o.socketPath()
	if path == "" {
		return nil
	}
	release, err := ownSocket(path)
	switch {
	case errors.Is(err, errListens), errors.Is(err, fs.ErrNotExist): // of a running process, or there is no folder
		return nil
	case err == nil:
		err = removeSocket(ctx, path)
		release()
	}
	if err != nil && !errors.Is(err, errListens) {
		return fmt.Errorf("remove debug socket: %w", err)
	}
	_ = os.Remove(filepath.Dir(path)) // only if it is empty
	return nil
}

// privateListener refuses other users, whatever the mode of the socket's file becomes.
type privateListener struct {
	*net.UnixListener

	path    string
	file    os.FileInfo // of the socket
	release func()      // ends the ownership of the socket's path
}

// errRemoved means that nobody can connect any more.
var errRemoved = errors.New("another program has removed or replaced the socket")

// presencePeriod is how often the listener looks whether its socket is still there.
const presencePeriod = 2 * time.Second

// Close removes the socket, if it is still there.
func (l *privateListener) Close() error {
	defer l.release()
	if l.isThere() {
		_ = os.Remove(l.path) // the folder may be read-only; who starts next removes it
	}
	return l.UnixListener.Close()
}

func (l *privateListener) isThere() bool {
	now, err := os.Lstat(l.path)
	return err == nil && os.SameFile(now, l.file)
}

// Accept waits for the next connection of a user who may connect. It fails if the socket is gone.
func (l *privateListener) Accept() (net.Conn, error) {
	for {
		if err := l.SetDeadline(time.Now().Add(presencePeriod)); err != nil {
			return nil, err
		}
		conn, err := l.UnixListener.Accept()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if !l.isThere() {
				return nil, fmt.Errorf("%w %s: leave it to its process, or choose another path with --debug-socket", errRemoved, l.path)
			}
		case err != nil || peer.IsTrusted(conn):
			return conn, err
		default:
			_ = conn.Close()
		}
	}
}
