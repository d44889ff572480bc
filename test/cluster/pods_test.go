//go:build cluster

package cluster

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// pod creates a Pod that runs and is ready at an endpoint's address, with its name
// as the label name and 8080 as the port named http. There is no kubelet, so a
// deleted Pod terminates until the test ends.
func (w *world) pod(name string, e endpoint) *corev1.Pod {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, Labels: map[string]string{"name": name, "app": "web"}},
		Spec: corev1.PodSpec{NodeName: e.node, Containers: []corev1.Container{{Name: "c", Image: "i",
			Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}},
	}
	if e.port != 0 {
		pod.Spec.Containers[0].Ports[0].ContainerPort = e.port
	}
	w.admin.create(pod)
	ip := e.host.IPv4.String()
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	w.admin.update(pod, "status")
	return pod
}

// setReady sets a Pod's condition Ready.
func (w *world) setReady(pod *corev1.Pod, ready bool) {
	w.t.Helper()
	w.admin.read(pod)
	pod.Status.Conditions[0].Status = corev1.ConditionFalse
	if ready {
		pod.Status.Conditions[0].Status = corev1.ConditionTrue
	}
	w.admin.update(pod, "status")
}

// changeSlice edits an existing EndpointSlice.
func (w *world) changeSlice(name string, edit func(*discoveryv1.EndpointSlice)) {
	w.t.Helper()
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	w.admin.read(s)
	edit(s)
	w.admin.update(s)
}

func (w *world) labelSlice(name, label, value string) {
	w.t.Helper()
	w.changeSlice(name, func(s *discoveryv1.EndpointSlice) { s.Labels[label] = value })
}

// namePort names the only TCP port of a slice.
func (w *world) namePort(slice, port string) {
	w.t.Helper()
	w.changeSlice(slice, func(s *discoveryv1.EndpointSlice) { s.Ports = s.Ports[:1]; s.Ports[0].Name = ptr.To(port) })
}

// widen gives a slice the ports p0, p1 and so on, all with the first port's
// number.
func (w *world) widen(slice string, n int) {
	w.t.Helper()
	w.changeSlice(slice, func(s *discoveryv1.EndpointSlice) {
		first := s.Ports[0]
		s.Ports = nil
		for i := range n {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To(fmt.Sprintf("p%d", i)), Port: first.Port, Protocol: first.Protocol})
		}
	})
}

// large sends bytes to an echo server and expects all of them back.
func (w *world) large(from *netns.Host, network, address string, size int) {
	w.t.Helper()
	if err := echoLarge(from, network, address, size); err != nil {
		w.t.Errorf("%d bytes, %s from %s to %s: %v", size, network, from.Name(), address, err)
	}
}

func echoLarge(from *netns.Host, network, address string, size int) error {
	c, err := from.Dial(network, address)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	sent := bytes.Repeat([]byte("sluice gate "), size/12+1)[:size]
	var back []byte
	if network == "udp" {
		if _, err := c.Write(sent); err != nil {
			return err
		}
		buffer := make([]byte, 65536)
		n, err := c.Read(buffer)
		if err != nil {
			return err
		}
		back = buffer[:n]
	} else {
		go func() {
			_, _ = c.Write(sent)
			_ = c.(*net.TCPConn).CloseWrite()
		}()
		if back, err = io.ReadAll(c); err != nil {
			return err
		}
	}
	if _, back, _ = bytes.Cut(back, []byte("\n")); !bytes.Equal(back, sent) {
		return fmt.Errorf("%d bytes came back, or others", len(back))
	}
	return nil
}

// deleteNow deletes a Pod immediately.
func (w *world) deleteNow(pod *corev1.Pod) {
	w.t.Helper()
	now := &metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
	if err := w.admin.request("DELETE", pod).Body(now).Do(ctx).Error(); err != nil {
		w.t.Fatalf("deleting %s: %v", pod.Name, err)
	}
}
