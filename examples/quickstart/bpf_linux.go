package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// sockets are what mode ebpf needs beside the cluster: a BPF file system, and the cgroup of this process.
// Both are mounted where only this process finds them: they end with it, whatever ends it.
type sockets struct {
	bpffs, cgroups *os.File
	config         ebpf.Sockets
	engines        []*ebpf.Engine
}

func newSockets() (s *sockets, err error) {
	s = &sockets{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.bpffs, err = mountHidden("bpf"); err != nil {
		return s, err
	}
	if s.cgroups, err = mountHidden("cgroup2"); err != nil {
		return s, err
	}
	own, err := ownCgroup()
	if err != nil {
		return s, err
	}
	s.config = ebpf.Sockets{
		BPFFS: pathOf(s.bpffs), Cgroups: []string{filepath.Join(pathOf(s.cgroups), own)},
		// All hosts of the demonstration are in this process.
		Namespaces: &ebpf.Namespaces{Only: true},
	}
	return s, nil
}

// mountHidden mounts a file system without a place in the tree of files.
func mountHidden(kind string) (*os.File, error) {
	dir, err := os.MkdirTemp("", "quickstart-"+kind)
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(dir) }()
	if err := unix.Mount("none", dir, kind, 0, ""); err != nil {
		return nil, fmt.Errorf("mount a file system of type %s: %w", kind, err)
	}
	root, err := os.Open(dir)
	return root, errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
}

func pathOf(dir *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", dir.Fd()) }

// ownCgroup is the directory of this process below the root of cgroup v2.
func ownCgroup() (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			return path, nil
		}
	}
	return "", errors.New("this process is in no cgroup of version 2")
}

// provider returns the proxy of the cluster, whose node and local pods are translated.
func (s *sockets) provider(c *cluster, config proxier.Config, deps proxier.Deps) (*proxier.Proxier, error) {
	translated := []string{c.node.path(), c.clients["pod"].host.path()}
	for _, p := range c.pods {
		if p.link.hub == c.node {
			translated = append(translated, p.link.pod.path())
		}
	}
	for _, ns := range translated {
		if err := s.config.Namespaces.Add(ns); err != nil {
			return nil, err
		}
	}
	deps.Wrap = func(_ v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
		if one, ok := engine.(*ebpf.Engine); ok {
			s.engines = append(s.engines, one)
		}
		return engine, nil
	}
	return ebpf.New(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: s.config}, deps)
}

// write prints how many sockets were translated.
func (s *sockets) write(out io.Writer) error {
	var all connection.SocketCounts
	for _, engine := range s.engines {
		counts, err := engine.SocketCounts()
		if err != nil {
			return err
		}
		all.Translated += counts.Translated
		all.Bound += counts.Bound
		all.Namespace += counts.Namespace
	}
	_, err := fmt.Fprintf(out, "%d sockets were translated when they connected; to the same frontends, rules served %d of hosts outside, and %d of the node that were bound\n",
		all.Translated, all.Namespace, all.Bound)
	return err
}

// close unmounts both.
func (s *sockets) close() error {
	var errs []error
	for _, dir := range []*os.File{s.bpffs, s.cgroups} {
		if dir != nil {
			errs = append(errs, dir.Close())
		}
	}
	return errors.Join(errs...)
}
