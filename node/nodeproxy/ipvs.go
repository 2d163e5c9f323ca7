package nodeproxy

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
)

// virtualServers are the flags of the ipvs mode.
type virtualServers struct {
	tuning

	scheduler                             string
	schedulerFlags                        []string
	exclude                               []string
	strictARP                             bool
	tcpTimeout, tcpFinTimeout, udpTimeout time.Duration
	leaveTimeout                          time.Duration
}

func (v *virtualServers) register(f *pflag.FlagSet) {
	f.StringVar(&v.scheduler, "ipvs-scheduler", "rr", "scheduler of mode ipvs, by its name in the kernel: rr, lc, sh, mh…")
	f.StringSliceVar(&v.schedulerFlags, "ipvs-scheduler-flags", nil, "flags of virtual servers in mode ipvs: fallback and port for the schedulers sh and mh (mh always has port), and ops, which schedules each UDP datagram")
	f.StringSliceVar(&v.exclude, "ipvs-exclude-cidrs", nil, "CIDRs whose virtual servers mode ipvs does not delete")
	f.BoolVar(&v.strictARP, "ipvs-strict-arp", false, "do not answer ARP requests for VIPs in mode ipvs")
	f.DurationVar(&v.minSyncPeriod, "ipvs-min-sync-period", shortSyncPeriod, "minimum time between syncs; 0 for no limit")
	f.DurationVar(&v.syncPeriod, "ipvs-sync-period", 30*time.Second, "maximum time between retries of a failed sync")
	f.DurationVar(&v.tcpTimeout, "ipvs-tcp-timeout", 0, "IPVS timeout of idle TCP connections; 0 keeps the value")
	f.DurationVar(&v.tcpFinTimeout, "ipvs-tcpfin-timeout", 0, "IPVS timeout of TCP connections after a FIN; 0 keeps the value")
	f.DurationVar(&v.udpTimeout, "ipvs-udp-timeout", 0, "IPVS timeout of UDP flows; 0 keeps the value")
	f.DurationVar(&v.leaveTimeout, "ipvs-leave-timeout", 24*time.Hour, "how long open connections may continue after a change from mode ipvs to another one")
}

// The flags of virtual servers, by their names in ipvsadm.
const (
	schedulerFallback  = "fallback"
	schedulerPort      = "port"
	schedulerOnePacket = "ops"
)

func (v *virtualServers) has(flag string) bool { return slices.Contains(v.schedulerFlags, flag) }

func (v *virtualServers) validate(f *faults) {
	v.tuning.validate(f, modeIPVS)
	_, ok := parsePrefixes(v.exclude)
	f.check(ok, "ipvs-exclude-cidrs", strings.Join(v.exclude, ","), "ranges such as 192.0.2.0/24")
	f.check(v.leaveTimeout > 0, "ipvs-leave-timeout", v.leaveTimeout, "more than 0")
	f.check(len(v.scheduler) <= 15, "ipvs-scheduler", v.scheduler, "15 bytes at most")
	unknown := slices.DeleteFunc(slices.Clone(v.schedulerFlags), func(s string) bool {
		return s == schedulerFallback || s == schedulerPort || s == schedulerOnePacket
	})
	f.check(len(unknown) == 0, "ipvs-scheduler-flags", strings.Join(v.schedulerFlags, ","), "fallback, port or ops")
	for flag, timeout := range map[string]time.Duration{
		"ipvs-tcp-timeout": v.tcpTimeout, "ipvs-tcpfin-timeout": v.tcpFinTimeout, "ipvs-udp-timeout": v.udpTimeout,
	} {
		f.check(timeout >= 0 && timeout%time.Second == 0, flag, timeout, "whole seconds, 0 or more")
	}
}

// leaving returns what removes the objects of mode ipvs in another mode, when their
// connections have ended. It is nil in mode ipvs, and where there is no IPVS.
func (o *options) leaving(config proxier.Config, registry prometheus.Registerer, log *zap.Logger) (*ipvs.Leaving, error) {
	if o.kernelMode() == modeIPVS {
		return nil, nil
	}
	deps := proxier.Deps{Logger: log}
	before := o.ipvs.config(config, deps)
	before.Drain = o.ipvs.leaveTimeout
	l, err := ipvs.NewLeaving(before, deps)
	if errors.Is(err, proxier.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return l, registry.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "serviceplane_ipvs_leaving_connections",
		Help: "Number of connections that still pass IPVS after a change from mode ipvs.",
	}, func() float64 { return float64(l.Connections()) }))
}

func (v *virtualServers) provider(config proxier.Config, deps proxier.Deps) (*proxier.Proxier, error) {
	return ipvs.New(v.config(config, deps), deps)
}

func (v *virtualServers) config(config proxier.Config, deps proxier.Deps) ipvs.Config {
	exclude, _ := parsePrefixes(v.exclude) // validated
	return ipvs.Config{
		Config: config, Scheduler: v.scheduler, ExcludeCIDRs: exclude, StrictARP: v.strictARP, SetSysctls: true,
		HashPort:     v.scheduler == "mh" || v.has(schedulerPort), // mh as in kube-proxy
		HashFallback: v.has(schedulerFallback), OnePacket: v.has(schedulerOnePacket),
		Firewall: func(family v1.IPFamily) (proxier.Engine, error) { // as in kube-proxy, if iptables is installed
			return iptables.NewEngine(iptables.Config{Config: config, HealthChecksOnly: true}, family, deps)
		},
		TCPTimeout: v.tcpTimeout, TCPFinTimeout: v.tcpFinTimeout, UDPTimeout: v.udpTimeout,
	}
}
