package main

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// mode is the engine that programs the Services.
type mode string

const (
	modeNFTables  mode = "nftables"
	modeIPTables  mode = "iptables"
	modeIPVS      mode = "ipvs"
	modeEBPF      mode = "ebpf"
	modeUserspace mode = "userspace" // has its own demonstration
)

func modes() []string {
	return []string{string(modeNFTables), string(modeIPTables), string(modeIPVS), string(modeEBPF), string(modeUserspace)}
}

// kernelModes returns the modes that work with any kernel.
func kernelModes() []mode { return []mode{modeNFTables, modeIPTables, modeEBPF} }

// Set implements flag.Value.
func (m *mode) Set(text string) error {
	if !slices.Contains(modes(), text) {
		return fmt.Errorf("want %s", strings.Join(modes(), " or "))
	}
	*m = mode(text)
	return nil
}

// String implements flag.Value.
func (m *mode) String() string { return string(*m) }

// engine returns the engine of one IP family.
func (m mode) engine(config proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
	switch m {
	case modeIPTables:
		return iptables.NewEngine(iptables.Config{Config: config}, family, proxier.Deps{})
	case modeIPVS:
		return ipvs.NewEngine(ipvs.Config{Config: config}, family, proxier.Deps{})
	case modeEBPF:
		return ebpf.NewEngine(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: ebpf.Sockets{Cgroups: []string{"/sys/fs/cgroup/kubepods.slice"}}}, family, proxier.Deps{})
	case modeNFTables, modeUserspace:
	}
	return nftables.NewEngine(nftables.Config{Config: config}, family, proxier.Deps{})
}

// provider returns the proxy. That of mode ebpf needs more: see sockets.
func (m mode) provider(config proxier.Config, deps proxier.Deps) (*proxier.Proxier, error) {
	switch m {
	case modeIPTables:
		return iptables.New(iptables.Config{Config: config}, deps)
	case modeIPVS:
		return ipvs.New(ipvs.Config{Config: config, SetSysctls: true}, deps)
	case modeNFTables, modeEBPF, modeUserspace:
	}
	return nftables.New(nftables.Config{Config: config}, deps)
}
