package coexistence

import (
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// accounts are what programs look up root in; no script of a package has written it.
func (s *sandbox) accounts() {
	s.t.Helper()
	s.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
	s.write("/etc/group", "root:x:0:\n")
}

const busConfig = `<busconfig><type>system</type><listen>unix:path=/run/bus</listen><auth>EXTERNAL</auth><policy context="default">
<allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>
`

// strictFirewalld refuses ports that only others have opened.
func (w *world) strictFirewalld() {
	w.run("sed -i s/StrictForwardPorts=no/StrictForwardPorts=yes/ /etc/firewalld/firewalld.conf\ngrep -q ^StrictForwardPorts=yes /etc/firewalld/firewalld.conf")
	w.firewalld()
}

// firewalld starts it with a message bus of its own, and with its default zone, public.
func (w *world) firewalld() {
	w.accounts()
	w.write("/tmp/bus.conf", busConfig)
	w.daemon("dbus-daemon", "--config-file=/tmp/bus.conf", "--nofork", "--nopidfile")
	poll.Nil(w.t, "the message bus runs", func() error { _, err := w.try("test -S /run/bus"); return err })
	w.daemon("firewalld", "--nofork", "--nopid")
	poll.Nil(w.t, "firewalld runs", func() error { _, err := w.try("firewall-cmd --state"); return err })
}

// reloadFirewalld lets it write its rules again after nftables.service has flushed all.
func (w *world) reloadFirewalld() {
	w.run("nft flush ruleset\nfirewall-cmd --complete-reload")
}

// ufw enables it as it is installed.
func (w *world) ufw() {
	w.accounts()
	w.run("cp /usr/share/ufw/ufw.conf /usr/share/ufw/*.init /usr/share/ufw/iptables/*.rules /etc/ufw/\nufw --force enable\nufw reload") // which adds rules that enable does not write
}

func (w *world) reloadUFW() { w.run("ufw reload") }

const netavarkNetwork = `{"container_id":"6ce776ea58b5","container_name":"web",
"networks":{"podman":{"static_ips":["10.88.0.5","fd10:88::5"],"interface_name":"eth0"}},
"port_mappings":[{"container_port":8080,"host_ip":"","host_port":8081,"protocol":"tcp","range":1}],
"network_info":{"podman":{"name":"podman","id":"2f259bab93aaaaa2542ba43ef33eb990d0999ee1b9924b557b7be53c0b7a1bb9","driver":"bridge",
"network_interface":"podman0","subnets":[{"subnet":"10.88.0.0/16","gateway":"10.88.0.1"},{"subnet":"fd10:88::/64","gateway":"fd10:88::1"}],
"ipv6_enabled":true,"internal":false,"dns_enabled":false,"ipam_options":{"driver":"host-local"}}}}
`

// netavark connects a container with a published port, as Podman has it do.
func netavark(firewall string) (setUp, reload func(w *world)) {
	command := "NETAVARK_FW=" + firewall + " netavark --config /run/netavark --file /tmp/network "
	setUp = func(w *world) {
		container := netnstest.New(w.t)
		netnstest.Serve(w.t, container, "pod-2", 8080)
		w.write("/tmp/network", netavarkNetwork)
		w.write("/tmp/container", container.Path())
		w.run("mkdir -p /run/netavark\n" + command + `setup "$(cat /tmp/container)"`)
	}
	return setUp, func(w *world) {
		w.run(command + "teardown \"$(cat /tmp/container)\" || true\n" + command + `setup "$(cat /tmp/container)"`)
	}
}

const portmapConfig = `{"cniVersion":"0.4.0","name":"pods","type":"portmap","snat":true,
"runtimeConfig":{"portMappings":[{"hostPort":8081,"containerPort":8080,"protocol":"tcp"}]},
"prevResult":{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","sandbox":"<pod>"}],
"ips":[{"version":"4","interface":0,"address":"<4>/28"},{"version":"6","interface":0,"address":"<6>/80"}]}}
`

// portmap gives the last pod a host port, as a container runtime has the plugin do.
func (w *world) portmap() {
	pod := w.net.LocalPods[2]
	w.write("/tmp/portmap", strings.NewReplacer("<pod>", pod.NetNS(),
		"<4>", pod.Addr(v1.IPv4Protocol).String(), "<6>", pod.Addr(v1.IPv6Protocol).String()).Replace(portmapConfig))
	w.callPortmap("ADD")
}

func (w *world) reloadPortmap() {
	w.callPortmap("DEL")
	w.callPortmap("ADD")
}

func (w *world) callPortmap(command string) {
	w.run("CNI_COMMAND=" + command + " CNI_CONTAINERID=6ce776ea58b5 CNI_NETNS=" + w.net.LocalPods[2].NetNS() +
		" CNI_IFNAME=eth0 CNI_PATH=/usr/lib/cni portmap </tmp/portmap")
}

// vpc drops what AWS drops: packets of a pod that leave by the primary interface, where its address is not.
func (w *world) vpc() {
	w.script("nft add table <nft> vpc\n" +
		"nft 'add chain <nft> vpc leaving { type filter hook postrouting priority 300; }'\n" +
		"nft 'add rule <nft> vpc leaving oifname uplink meta mark & 0x80 == 0x80 <nft> saddr <pods> drop'")
}
