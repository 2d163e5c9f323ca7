package proxiertest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// socketPriority is an SO_PRIORITY of its own, which is no class of an engine.
const socketPriority = 5

// priorityObserver counts what leaves after the network stack, and before any queue, of
// connections from one port.
const priorityObserver = `table inet observer {
	counter kept { }
	counter lost { }
	chain leaving {
		type filter hook postrouting priority 500
		oifname "lo" accept
		meta l4proto %[1]s ct original proto-src %[2]d meta priority 0:%[3]x counter name kept accept
		meta l4proto %[1]s ct original proto-src %[2]d counter name lost
	}
}`

// priorityScenarios are about the packets of the node's own sockets.
func priorityScenarios(f Features) []scenario {
	if f.SourceLost { // the proxy's sockets send, not those of clients
		return nil
	}
	const rule = "Every packet of the node's own connection to a Service leaves with the priority of its socket (SO_PRIORITY), also the first one."
	return []scenario{plays("PKT-87", rule, playPriority, service{endpoints: ready(remote0)})}
}

// lostPriorities is how many packets of a connection lose their priority.
func (f *Features) lostPriorities(network string) int {
	if f.FirstPriorityLost && !f.isBySocket(network) {
		return 1
	}
	return 0
}

func playPriority(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs the program nft, to observe packets")
	}
	nft := func(args ...string) (out []byte) {
		t.Helper()
		netnstest.Check(t, s.world.Node.Do(func() (err error) {
			out, err = exec.CommandContext(ctx, "nft", args...).CombinedOutput()
			if err != nil {
				t.Logf("nft %v: %s", args, out)
			}
			return err
		}))
		return out
	}
	port := 20000 // another one for each connection: late packets of the one before do not count
	for _, family := range families() {
		for _, network := range []string{"tcp", "udp"} {
			t.Run(string(family)+"/"+network, func(t *testing.T) {
				to := s.address(clusterIP, family)
				observe := func(from *Host, atLeast int) (kept, lost int) {
					port++
					nft(fmt.Sprintf(priorityObserver, network, port, socketPriority))
					defer nft("delete", "table", "inet", "observer")
					var conn net.Conn
					netnstest.Check(t, from.Do(func() (err error) {
						conn, err = sendWithPriority(ctx, network, port, to)
						return err
					}))
					defer func() { _ = conn.Close() }() // afterwards: the kernel may answer for a socket that is gone
					poll.Until(t, "packets leave", func() bool {
						kept, lost = counters(t, nft("-j", "list", "counters", "table", "inet", "observer"))
						return kept+lost >= atLeast
					})
					return kept, lost
				}
				want := s.features.lostPriorities(network)
				if kept, lost := observe(s.world.Node, packetsWithPriority); lost != want {
					t.Errorf("%d packets left with the priority of the socket, and %d without it, want %d", kept, lost, want)
				}
				// A flowtable may hide all but the first one.
				if kept, _ := observe(s.world.LocalPods[0], 1); kept != 0 {
					t.Errorf("%d packets of a pod have the priority of its socket: no veth pair passes it on", kept)
				}
			})
		}
	}
}

// packetsWithPriority is the least number of packets that sendWithPriority sends.
const packetsWithPriority = 3

// sendWithPriority opens a connection whose socket has a priority, and asks three times.
func sendWithPriority(ctx context.Context, network string, port int, to netip.AddrPort) (conn net.Conn, err error) {
	var from net.Addr = &net.TCPAddr{Port: port}
	if network == "udp" {
		from = &net.UDPAddr{Port: port}
	}
	d := net.Dialer{Timeout: answerTimeout, LocalAddr: from, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, socketPriority)
		})
		if err == nil {
			err = controlErr
		}
		return err
	}}
	conn, err = d.DialContext(ctx, network, to.String())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	_ = conn.SetDeadline(time.Now().Add(answerTimeout))
	for range packetsWithPriority {
		if _, err = conn.Write([]byte("x\n")); err != nil {
			return nil, err
		}
		if _, err = conn.Read(make([]byte, 512)); err != nil {
			return nil, err
		}
	}
	return conn, nil
}

// counters reads those of the observer.
func counters(t *testing.T, text []byte) (kept, lost int) {
	t.Helper()
	var document struct {
		NFTables []struct {
			Counter struct {
				Name    string `json:"name"`
				Packets int    `json:"packets"`
			} `json:"counter"`
		} `json:"nftables"`
	}
	netnstest.Check(t, json.Unmarshal(text, &document))
	packets := map[string]int{}
	for _, o := range document.NFTables {
		packets[o.Counter.Name] = o.Counter.Packets
	}
	return packets["kept"], packets["lost"]
}
