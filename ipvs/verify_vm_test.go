//go:build vm

package ipvs

import (
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify names each damage that ipvsadm and ip cause.
func TestVerifyNamesEachDamageOfTheKernel(t *testing.T) {
	names := proxier.DefaultNames()
	const table = " of virtual server 10.96.0.1:80/TCP"
	for what, damage := range map[string]struct {
		command []string
		want    []string
	}{
		"virtual server deleted": {[]string{"ipvsadm", "-D", "-t", web}, []string{"missing web virtual server " + web + "/TCP"}},
		"virtual server added": {
			[]string{"sh", "-c", "ipvsadm -A -t 10.96.0.1:81 -s rr && ipvsadm -a -t 10.96.0.1:81 -r 10.244.0.1:8080 -m"},
			[]string{"unexpected - virtual server 10.96.0.1:81/TCP"},
		},
		"foreign virtual server": {[]string{"sh", "-c", "ipvsadm -A -t 203.0.113.1:80 -s rr && ipvsadm -a -t 203.0.113.1:80 -r 10.244.0.1:8080 -m"}, nil},
		"another scheduler":      {[]string{"ipvsadm", "-E", "-t", web, "-s", "lc"}, []string{"different web virtual server " + web + "/TCP"}},
		"persistent":             {[]string{"ipvsadm", "-E", "-t", web, "-s", "rr", "-p", "60"}, []string{"different web virtual server " + web + "/TCP"}},
		"real server deleted":    {[]string{"ipvsadm", "-d", "-t", web, "-r", podA}, []string{"missing web real server " + podA + table}},
		"real server added":      {[]string{"ipvsadm", "-a", "-t", web, "-r", stranger, "-m"}, []string{"unexpected web real server " + stranger + table}},
		"draining real server":   {[]string{"ipvsadm", "-a", "-t", web, "-r", stranger, "-m", "-w", "0"}, nil},
		"endpoint gets nothing":  {[]string{"ipvsadm", "-e", "-t", web, "-r", podA, "-m", "-w", "0"}, []string{"different web real server " + podA + table}},
		"all deleted": {[]string{"ipvsadm", "-C"}, []string{
			"missing least virtual server 10.96.0.3:80/TCP", "missing sticky virtual server 10.96.0.2:80/TCP", "missing web virtual server " + web + "/TCP",
		}},
		"address deleted": {[]string{"ip", "address", "delete", "10.96.0.1/32", "dev", names.Device}, []string{"missing web address 10.96.0.1 of device " + names.Device}},
		"address added":   {[]string{"ip", "address", "add", "10.96.9.9/32", "dev", names.Device}, []string{"unexpected - address 10.96.9.9 of device " + names.Device}},
	} {
		t.Run(what, func(t *testing.T) {
			b := bare{t, netnstest.New(t).Path()}
			e, u := b.engine("IPv4", names), verified()
			u.Globals.NodePortAddresses = nil // the namespace has no address for them
			mustApply(t, e, u)
			mustFind(t, e, u, "at first")
			b.run(damage.command[0], damage.command[1:]...)
			mustFind(t, e, u, what, damage.want...)
			mustFind(t, e, u, "again, as Verify writes nothing", damage.want...)
			mustApply(t, e, u)
			mustFind(t, e, u, "after the repair")
		})
	}
}
